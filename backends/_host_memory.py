"""Host memory that devices and drives can move data from and to directly."""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from typing import TYPE_CHECKING

from tierstore.errors import CapacityError
from tierstore.metrics import readable

if TYPE_CHECKING:
    import torch

    from tierstore.device import Device, Event

__all__ = ["Block", "BlockPool", "HostSlab"]

_HUGE_PAGE_NBYTES = 2 * 2**20


class HostSlab:
    """One stretch of memory, of exact size, page-locked where there is CUDA.

    ``mmap`` and ``cudaHostRegister`` instead of ``pin_memory``: torch rounds a page-locked
    allocation up to a power of two.

    Parameters
    ----------
    nbytes
        Size, at least 1; the slab starts at a page.
    device
        The memory is page-locked if this one copies asynchronously.

    Raises
    ------
    CapacityError
        No memory, or page-locking it was refused.
    """

    def __init__(self, nbytes: int, device: Device) -> None:
        import torch

        self.nbytes = nbytes
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise CapacityError(
                12,  # ENOMEM
                f"the host has no {nbytes:,} bytes ({readable(nbytes)}) to hold state in; "
                "choose a file tier, or give each host fewer ranks",
            ) from error
        if nbytes >= _HUGE_PAGE_NBYTES:
            # Not every kernel has transparent huge pages; without them it is only slower.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        # A fork (a DataLoader worker) while a direct read is under way would leave parent and
        # child with different halves of the page.
        self._map.madvise(mmap.MADV_DONTFORK)
        self.tensor: torch.Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        # Faults the pages in with torch's threads, so that no transfer meets an untouched page.
        self.tensor.zero_()
        self._registered = False
        if device.asynchronous:
            self._register()

    def _register(self) -> None:
        import torch

        runtime = torch.cuda.cudart()
        result = runtime.cudaHostRegister(self.tensor.data_ptr(), self.nbytes, 0)
        if int(result) != 0:
            raise CapacityError(
                12,
                f"page-locking {self.nbytes:,} bytes of host memory was refused "
                f"(cudaHostRegister: {result}); raise the limit on locked memory (ulimit -l, or "
                "the container's memlock) or lower --optimizer-state-host-memory",
            )
        self._registered = True

    def buffer(self, start: int, nbytes: int) -> memoryview:
        """The bytes ``[start, start + nbytes)``, for system calls."""
        return memoryview(self._map)[start : start + nbytes]

    def close(self) -> None:
        """Undo the page lock; the memory goes when the last view of it goes."""
        if self._registered:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._registered = False


class Block:
    """Host memory for one tile of one array and its checksum.

    Attributes
    ----------
    tensor, buffer
        The same bytes, for copies and for system calls.
    busy_until
        Event after which the block may be overwritten.
    """

    __slots__ = ("buffer", "busy_until", "tensor")

    def __init__(self, tensor: torch.Tensor, buffer: memoryview) -> None:
        self.tensor = tensor
        self.buffer = buffer
        self.busy_until: Event = None

    def wait_until_free(self) -> None:
        """Return when no copy from or to the block is under way."""
        if self.busy_until is not None:
            self.busy_until.synchronize()
            self.busy_until = None


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
