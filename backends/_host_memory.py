"""Host memory that devices and drives can move data from and to directly."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from tierstore.backends._io_threads import IoThreads
from tierstore.backends._numa import cpus_near
from tierstore.errors import CapacityError
from tierstore.metrics import GIB, readable

if TYPE_CHECKING:
    import torch

    from tierstore.device import Device, Events

__all__ = ["Block", "BlockPool", "HostSlab"]

_logger = logging.getLogger("tierstore.memory")
_HUGE_PAGE_NBYTES = 2 * 2**20
_FAULT_NBYTES = 64 * 2**20
_FAULT_THREADS = 16
_REGISTER_NBYTES = 2 * GIB
_PROGRESS_S = 5.0
# Of Linux 5.14; Python 3.11 has no name for it.
_MADV_POPULATE_WRITE = 23


class HostSlab:
    """One stretch of memory, of exact size, page-locked where there is CUDA.

    ``mmap`` and ``cudaHostRegister`` instead of ``pin_memory``: torch rounds a page-locked
    allocation up to a power of two, and faults its pages in with one thread. Pages come from the
    memory of the device's own NUMA node, where the machine says which one that is.

    Parameters
    ----------
    nbytes
        Size, at least 1; the slab starts at a page.
    device
        The memory is page-locked if this one copies asynchronously.
    cuts
        Bytes, in order and multiples of 4096, where the page lock may end and another begin: no
        copy may cross one. Hundreds of GB are locked in several parts, so that it can be told how
        far it is.

    Raises
    ------
    CapacityError
        No memory, or page-locking it was refused; nothing is left locked.
    """

    def __init__(self, nbytes: int, device: Device, cuts: Iterable[int] = ()) -> None:
        import torch

        self.nbytes = nbytes
        self._device = device
        self._locked: list[int] = []
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise _no_memory(nbytes) from error
        if nbytes >= _HUGE_PAGE_NBYTES:
            # Not every kernel has transparent huge pages; without them it is only slower.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        # A fork (a DataLoader worker) while a direct read is under way would leave parent and
        # child with different halves of the page.
        self._map.madvise(mmap.MADV_DONTFORK)
        self.tensor: torch.Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        try:
            self._make_resident(list(_parts(nbytes, cuts)))
        except BaseException:
            self.close()
            raise

    def _make_resident(self, parts: list[range]) -> None:
        """Fault all pages in, and lock them where there is CUDA, part by part."""
        cpus = cpus_near(self._device.torch_device)
        pages = -(-self.nbytes // _FAULT_NBYTES)
        count = max(1, min(_FAULT_THREADS, os.cpu_count() or 1, pages))
        threads = IoThreads(count, "tierstore-fault-in", cpus)
        started = told = time.monotonic()
        try:
            for part in parts:
                pieces = range(part.start, part.stop, _FAULT_NBYTES)
                threads.run_all(
                    self._fault_in,
                    [range(start, min(start + _FAULT_NBYTES, part.stop)) for start in pieces],
                )
                if self._device.asynchronous:
                    self._lock(part)
                if time.monotonic() - told > _PROGRESS_S:
                    told = time.monotonic()
                    self._tell(part.stop, told - started)
        finally:
            threads.close()
        self._tell(self.nbytes, time.monotonic() - started)

    def _tell(self, nbytes: int, seconds: float) -> None:
        _logger.log(
            logging.INFO if seconds > _PROGRESS_S else logging.DEBUG,
            "%s of %s of host memory %s in %.1f s",
            readable(nbytes),
            readable(self.nbytes),
            "page-locked" if self._device.asynchronous else "made resident",
            seconds,
        )

    def _fault_in(self, part: range) -> None:
        address = self.tensor.data_ptr() + part.start
        # Through ctypes, which lets the other threads run meanwhile; mmap.madvise does not.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if madvise(address, len(part), _MADV_POPULATE_WRITE) == 0:
            return
        if ctypes.get_errno() != errno.EINVAL:
            raise _no_memory(self.nbytes)
        # An older kernel.
        ctypes.memset(address, 0, len(part))

    def _lock(self, part: range) -> None:
        import torch

        with torch.cuda.device(self._device.torch_device):
            result = torch.cuda.cudart().cudaHostRegister(
                self.tensor.data_ptr() + part.start, len(part), 0
            )
        if int(result) != 0:
            raise CapacityError(
                errno.ENOMEM,
                f"page-locking {self.nbytes:,} bytes ({readable(self.nbytes)}) of host memory was "
                f"refused after {part.start:,} (cudaHostRegister: {result}). Raise the limit on "
                "locked memory (ulimit -l unlimited; docker run --ulimit memlock=-1) or the memory "
                "of the container, or need less of it (--optimizer-state-host-memory for the file "
                "tiers; fewer ranks on this host for the cpu tier)",
            )
        self._locked.append(part.start)

    def buffer(self, start: int, nbytes: int) -> memoryview:
        """The bytes ``[start, start + nbytes)``, for system calls."""
        return memoryview(self._map)[start : start + nbytes]

    def close(self) -> None:
        """Undo the page lock; the memory goes when the last view of it goes."""
        while self._locked:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr() + self._locked.pop())


def _parts(nbytes: int, cuts: Iterable[int]) -> Iterator[range]:
    """The bytes of a slab in parts that end at cuts, each of about 2 GiB where there are cuts."""
    start = 0
    for cut, following in pairwise([*cuts, nbytes]):
        if following - start > _REGISTER_NBYTES and cut > start:
            yield range(start, cut)
            start = cut
    yield range(start, nbytes)


def _no_memory(nbytes: int) -> CapacityError:
    return CapacityError(
        errno.ENOMEM,
        f"the host has no {nbytes:,} bytes ({readable(nbytes)}) to hold state in; choose a file "
        "tier, or give each host fewer ranks",
    )


class Block:
    """Host memory for one tile of one array and its checksum.

    Attributes
    ----------
    tensor, buffer
        The same bytes, for copies and for system calls.
    busy_until
        Events after which the block may be overwritten.
    """

    __slots__ = ("buffer", "busy_until", "tensor")

    def __init__(self, tensor: torch.Tensor, buffer: memoryview) -> None:
        self.tensor = tensor
        self.buffer = buffer
        self.busy_until: Events = ()

    def wait_until_free(self) -> None:
        """Return when no copy from or to the block is under way."""
        for event in self.busy_until:
            event.synchronize()
        self.busy_until = ()


class BlockPool:
    """Blocks of one size in one slab.

    Parameters
    ----------
    count, block_nbytes
        How many, and how large: a multiple of 4096.
    device
        See `HostSlab`.
    """

    def __init__(self, count: int, block_nbytes: int, device: Device) -> None:
        self._slab = HostSlab(count * block_nbytes, device)
        self.nbytes = self._slab.nbytes
        self._all = [
            Block(
                self._slab.tensor[start : start + block_nbytes],
                self._slab.buffer(start, block_nbytes),
            )
            for start in range(0, self.nbytes, block_nbytes)
        ]
        # Its methods are atomic, so no lock is needed.
        self._free = deque(self._all)

    def take(self) -> Block:
        """A free block; the caller keeps to the store's sets, so there is always one.

        Raises
        ------
        IndexError
            There is none.
        """
        return self._free.popleft()

    def give(self, block: Block) -> None:
        """Give a block back."""
        self._free.append(block)

    def give_all(self) -> None:
        """Make every block free, also those of an interrupted call; no transfer is on its way."""
        self._free = deque(self._all)

    def close(self) -> None:
        """Undo the page lock; call it when no transfer is under way."""
        self._slab.close()
