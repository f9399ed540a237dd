"""A loop without overlap over files: what an offloader does before anybody has tuned it.

It keeps fp32 main params and both moments in three files, reads a bucket of up to 200 M elements of
each through the page cache into one page-locked buffer of 256 MiB, updates on the device, writes
back in place, and brings all files to the drive at the end of each step, so that memory does not
hide the writes. 24 bytes a parameter move. A crash in mid-step loses the state: there is one
generation, and no checksum.

*warm* leaves in the page cache what the last step put there; *cold* drops it before each step.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.device_slot import ARRAYS, SLOT_NUMEL, DeviceSlot
from benchmarks.peers.peer import Peer, Task
from benchmarks.problem import Problem
from tierstore.backends._host_memory import HostSlab
from tierstore.device import open_device

__all__ = ["SerialFiles", "cached_share", "cold", "warm"]

_BUFFER_NBYTES = 256 * 2**20
_ITEM_NBYTES = 4
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


class SerialFiles:
    """The loop and its files.

    Parameters
    ----------
    problem, optimizer, slot_numel
        See `DeviceSlot`.
    directory
        Where the files are made.
    cold
        Whether `prepare` drops them from the page cache.
    buffer_nbytes
        Size of the buffer, a multiple of 4.
    """

    def __init__(
        self,
        problem: Problem,
        optimizer: str,
        directory: Path,
        *,
        cold: bool,
        slot_numel: int = SLOT_NUMEL,
        buffer_nbytes: int = _BUFFER_NBYTES,
    ) -> None:
        self._slot = DeviceSlot(problem, optimizer, slot_numel)
        self._slab = HostSlab(buffer_nbytes, open_device(problem.weight.device))
        self._cold = cold
        self._cached: list[float] = []
        self._steps = 0
        self.moved_nbytes = 2 * len(ARRAYS) * problem.numel * _ITEM_NBYTES
        self.note = (
            f"fp32 main and moments in files, page cache {'dropped' if cold else 'kept'} before "
            "each step, one slot, no overlap, fdatasync at the end, update on the device"
        )
        self.paths = {name: directory / f"{name}.bin" for name in ARRAYS}
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._files = {name: os.open(path, flags, 0o600) for name, path in self.paths.items()}
        for bucket in self._slot.buckets():
            self._slot.initialise(bucket)
            self._write_bucket(bucket)
        self._sync()

    def prepare(self) -> None:
        """See `Peer`."""
        if not self._cold:
            return
        for file in self._files.values():
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        # For root only; without it the advice alone must do.
        with contextlib.suppress(OSError):
            _DROP_CACHES.write_text("3")
        self._cached.append(max(cached_share(file) for file in self._files.values()))

    def step(self) -> None:
        """See `Peer`."""
        for bucket in self._slot.buckets():
            for name, place in self._places(bucket):
                self._read(name, place, bucket.start)
            self._slot.update(bucket, self._steps)
            self._write_bucket(bucket)
        self._sync()
        self._steps += 1

    def _places(self, bucket: slice) -> Iterator[tuple[str, slice]]:
        """All stretches of a bucket that fill the buffer, array by array."""
        numel = self._slab.nbytes // _ITEM_NBYTES
        for name in ARRAYS:
            for start in range(bucket.start, bucket.stop, numel):
                yield name, slice(start, min(start + numel, bucket.stop))

    def _read(self, name: str, place: slice, bucket_start: int) -> None:
        data, elements = self._buffer(place)
        done = 0
        while done < len(data):
            count = os.preadv(self._files[name], [data[done:]], place.start * _ITEM_NBYTES + done)
            if count == 0:
                raise EOFError(f"{name}.bin is too short")
            done += count
        in_slot = slice(place.start - bucket_start, place.stop - bucket_start)
        # Not `non_blocking`: the buffer is free again when this returns.
        self._slot.arrays[name][in_slot].copy_(elements)

    def _write_bucket(self, bucket: slice) -> None:
        for name, place in self._places(bucket):
            data, elements = self._buffer(place)
            in_slot = slice(place.start - bucket.start, place.stop - bucket.start)
            elements.copy_(self._slot.arrays[name][in_slot])
            done = 0
            while done < len(data):
                done += os.pwritev(
                    self._files[name], [data[done:]], place.start * _ITEM_NBYTES + done
                )

    def _buffer(self, place: slice) -> tuple[memoryview, torch.Tensor]:
        """The part of the buffer that holds a stretch, for system calls and for copies."""
        nbytes = (place.stop - place.start) * _ITEM_NBYTES
        return self._slab.buffer(0, nbytes), self._slab.tensor[:nbytes].view(torch.float32)

    def _sync(self) -> None:
        for file in self._files.values():
            os.fdatasync(file)

    def findings(self) -> Mapping[str, Any]:
        """How much of a file the page cache still held before each step, at worst."""
        return {"cached_share": self._cached}

    def close(self) -> None:
        """Close the files and undo the page lock; the files stay."""
        for file in self._files.values():
            os.close(file)
        self._slab.close()


def cached_share(file: int) -> float:
    """Part of a file that the page cache holds, by ``mincore``."""
    nbytes = os.fstat(file).st_size
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(file, nbytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
        address, vector = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
        result = libc.mincore(address, ctypes.c_size_t(nbytes), vector)
        # The mapping can't be closed while an array refers to it.
        del view
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return float((pages & 1).mean())


@contextlib.contextmanager
def cold(problem: Problem, task: Task) -> Iterator[Peer]:
    """The loop, reading from the drive."""
    directory = Path(task.directory)
    with contextlib.closing(SerialFiles(problem, task.optimizer, directory, cold=True)) as peer:
        yield peer


@contextlib.contextmanager
def warm(problem: Problem, task: Task) -> Iterator[Peer]:
    """The loop, reading what of the files the page cache has room for."""
    directory = Path(task.directory)
    with contextlib.closing(SerialFiles(problem, task.optimizer, directory, cold=False)) as peer:
        yield peer
