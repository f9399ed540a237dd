"""Whether GPUDirect Storage really works in a directory, found out by trying.

Between a device and a drive there are two silent fallbacks, kvikio's and cuFile's own, and what
the driver says about itself is no proof. So a process in which both are switched off writes and
reads a few blocks there. Run as a program, this module is that process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tierstore.backends import _direct_io

__all__ = ["gpudirect_refused", "what_is_missing"]

_TRY_S = 120.0
_NBYTES = 2**20
_FILE_SYSTEMS = ("ext4", "xfs", "lustre", "nfs", "nfs4", "gpfs", "wekafs", "beegfs")
_WITHOUT_FALLBACK = {"KVIKIO_COMPAT_MODE": "OFF", "CUFILE_ALLOW_COMPAT_MODE": "false"}


_answers: dict[tuple[int, int], str] = {}


def gpudirect_refused(directory: Path, device_index: int) -> str:
    """Try GPUDirect Storage in a directory, once for each file system and device.

    Returns
    -------
    str
        Empty if bytes went from the device to the drive and back; else what the attempt met.
    """
    question = directory.stat().st_dev, device_index
    if question not in _answers:
        _answers[question] = _ask(directory, device_index)
    return _answers[question]


def _ask(directory: Path, device_index: int) -> str:
    command = [sys.executable, "-m", __name__, str(directory), str(device_index)]
    # What this process can import, also where a script has added to its path.
    path = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **_WITHOUT_FALLBACK, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TRY_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the attempt did not end within {_TRY_S:g} s"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the attempt ended with status {done.returncode}"


def what_is_missing(
    directory: Path, proc: Path = Path("/proc"), etc: Path = Path("/etc")
) -> list[str]:
    """What is known to stand in the way of GPUDirect Storage, for people to mend."""
    found = []
    if not (proc / "driver/nvidia-fs/version").exists():
        found.append("the kernel module nvidia-fs is not loaded (modprobe nvidia-fs)")
    configuration = Path(os.environ.get("CUFILE_ENV_PATH_JSON", etc / "cufile.json"))
    if not configuration.is_file():
        found.append(f"there is no {configuration} (or name another in CUFILE_ENV_PATH_JSON)")
    kind = _file_system(directory, proc)
    if kind not in _FILE_SYSTEMS:
        found.append(f"the file system is {kind}; cuFile knows {', '.join(_FILE_SYSTEMS)}")
    if refused := _direct_io.direct_io_refused(directory):
        found.append(refused)
    return found


def _file_system(directory: Path, proc: Path) -> str:
    """Type of the file system that holds a directory."""
    best, kind = -1, "unknown"
    place = directory.resolve()
    for line in (proc / "self/mounts").read_text().splitlines():
        _, mounted, found, *_ = line.split()
        # The kernel writes a space in a path as \040.
        mount = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mounted))
        if place.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), found
    return kind


def _try(directory: Path, device_index: int) -> None:
    """Write and read through cuFile alone; raises what it meets."""
    import cupy
    import kvikio

    with (
        cupy.cuda.Device(device_index),
        tempfile.TemporaryDirectory(prefix=".probe-", dir=directory) as scratch,
    ):
        path = Path(scratch) / "blocks"
        _direct_io.allocate_file(path, _NBYTES)
        written = cupy.random.default_rng(1).integers(0, 256, _NBYTES, dtype=cupy.uint8)
        read = cupy.zeros_like(written)
        cupy.cuda.runtime.deviceSynchronize()
        with kvikio.CuFile(path, "r+") as file:
            counts = file.pwrite(written).get(), file.pread(read).get()
        if counts != (_NBYTES, _NBYTES) or not (written == read).all():
            raise OSError(f"{counts} bytes of {_NBYTES} went and came back")


if __name__ == "__main__":
    _try(Path(sys.argv[1]), int(sys.argv[2]))
