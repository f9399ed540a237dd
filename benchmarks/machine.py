"""What the machine is, and what a process takes of it: for the banner and for each step."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import platform
import resource
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "cpu_s",
    "describe_machine",
    "file_system",
    "page_cache_nbytes",
    "peak_memory_nbytes",
    "reset_peak_memory",
]

_PACKAGES = ("tierstore", "numpy", "crc32c", "zarr", "cupy-cuda13x", "kvikio-cu13")


def describe_machine(directories: Sequence[str]) -> dict[str, Any]:
    """Hardware, kernel, versions and file systems, without names of hosts, users or paths.

    Parameters
    ----------
    directories
        As the user typed them; they are repeated so.
    """
    cuda = torch.cuda.is_available()
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpu_memory_nbytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
        "cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": _meminfo("MemTotal"),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "directories": [file_system(directory) for directory in directories],
    }


def file_system(directory: str) -> Mapping[str, Any]:
    """Type of the file system that a directory is or will be on, and its free bytes."""
    path = Path(directory).absolute()
    while not path.exists():
        path = path.parent
    return {
        "directory": directory,
        "file_system": _file_system_type(path.resolve()),
        "free_nbytes": shutil.disk_usage(path).free,
    }


def _file_system_type(path: Path) -> str:
    device = os.stat(path).st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    kinds: dict[Path, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        mount = Path(fields[4])
        # By device and by path: bind mounts share a device, and btrfs makes up its own numbers.
        if fields[2] == numbers or path.is_relative_to(mount):
            kinds[mount] = after.split()[0]
    return kinds[max((mount for mount in kinds if path.is_relative_to(mount)), key=_depth)]


def _depth(path: Path) -> int:
    return len(path.parts)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _meminfo(name: str) -> int:
    return _kib_in(Path("/proc/meminfo"), name)


def _kib_in(path: Path, name: str) -> int:
    """Value in bytes of a line such as ``VmHWM:  1234 kB``."""
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise KeyError(f"{path} has no line {name}")


def cpu_s() -> float:
    """Seconds that all threads of this process have spent on CPUs, in user and system mode."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def page_cache_nbytes() -> int:
    """Bytes of files that the machine keeps in memory; shared memory and tmpfs are left out."""
    return _meminfo("Cached") - _meminfo("Shmem")


def reset_peak_memory() -> None:
    """Let `peak_memory_nbytes` start anew."""
    # 5 resets the peak, and nothing else. Where it is not allowed the peak is of the process.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_nbytes() -> int:
    """Most bytes of memory that this process has had, page-locked ones included."""
    return _kib_in(Path("/proc/self/status"), "VmHWM")
