"""The ``nvme`` tier: chunk files, direct I/O, a pool of threads each for reads and for writes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from tierstore.backends import _direct_io
from tierstore.backends._file_store import FileStore
from tierstore.backends._host_memory import Block, BlockPool
from tierstore.backends._io_threads import IoThreads
from tierstore.errors import ConfigError, CorruptError, StateError
from tierstore.transfer import Transfer
from tierstore.zarr_format import CHECKSUM_NBYTES, checksum

if TYPE_CHECKING:
    import torch

    from tierstore.device import Events
    from tierstore.records import ArrayKey

__all__ = ["PosixStore"]

_logger = logging.getLogger("tierstore.nvme")


class PosixStore(FileStore):
    """State in files on a local drive, read and written past the page cache.

    Every tile passes through a page-locked block. A read fills the block, checks the crc32c and
    queues the copy to the device; a write queues the copy to the block, adds the crc32c and
    writes both at once.

    Parameters
    ----------
    config, device, identity
        See `FileStore`.
    """

    tier: ClassVar[str] = "nvme"

    def _start(self, refused: str) -> None:
        self.mode = "buffered" if refused else "direct"
        if refused:
            _logger.warning(
                "%s: %s; reading and writing through the page cache, which is slower and takes "
                "host memory. Use a local ext4 or xfs file system",
                self,
                refused,
            )
        formats = self._tree.formats.values()
        block_nbytes = max(form.stride_nbytes for form in formats)
        set_blocks = max(len(entry.arrays) for entry in self.optimizers.values())
        most = min(
            self.config.slots,
            max(1, *(entry.layout.n_tiles for entry in self.optimizers.values())),
        )
        self.read_sets, self.write_sets = _sets_within(
            self.config.host_memory_nbytes, set_blocks * block_nbytes, most
        )
        count = set_blocks * (self.read_sets + self.write_sets)
        self._blocks = BlockPool(count, block_nbytes, self.device)
        self._resources.callback(self._blocks.close)
        self.host_nbytes = self._blocks.nbytes
        self._readers = IoThreads(self._n_threads, "tierstore-read")
        self._resources.callback(self._readers.close)
        self._writers = IoThreads(self._n_threads, "tierstore-write")
        self._resources.callback(self._writers.close)

    def _run_all(self, function: Callable[[Any], None], items: Iterable[Any]) -> None:
        self._writers.run_all(function, items)

    def _read(self, key: ArrayKey, tile: int, out: torch.Tensor, after: Events) -> Transfer:
        transfer = Transfer()
        work = self._load_and_copy, self._current, key, tile, out, after
        self._readers.submit(self._carry, transfer, self._take(), *work)
        return transfer

    def _write(self, key: ArrayKey, tile: int, src: torch.Tensor, after: Events) -> Transfer:
        transfer, block = Transfer(), self._take()
        work: tuple[Any, ...] = self._save, self._target, key, tile
        if self.device.asynchronous:
            # Queued by the caller's thread, so that the event exists when this returns.
            after = (*after, *block.busy_until)
            try:
                elements = self._elements(block, key, src)
                block.busy_until = self.device.copy_out([elements], [src], after)
            except BaseException:
                self._blocks.give(block)
                raise
            transfer.device_done.set_result(block.busy_until)
        else:
            work = self._copy_and_save, transfer, self._target, key, tile, src, after
        self._writers.submit(self._carry, transfer, block, *work)
        return transfer

    def _take(self) -> Block:
        try:
            return self._blocks.take()
        except IndexError:
            raise StateError(
                f"{self}: more than {self.read_sets} tiles were being read, or more than "
                f"{self.write_sets} written, at once"
            ) from None

    # In the I/O threads.

    def _carry(
        self, transfer: Transfer, block: Block, work: Callable[..., Events], *arguments: Any
    ) -> None:
        """Do the work of one transfer; whatever happens, the transfer comes to an end.

        The block is given back first: who sees the end may take the next block at once.
        """
        try:
            block.wait_until_free()
            done = work(block, *arguments)
        except BaseException as error:  # the transfer reports it
            self._blocks.give(block)
            transfer.fail(error)
            return
        self._blocks.give(block)
        if not transfer.device_done.done():
            transfer.device_done.set_result(done)
        transfer.settled.set_result(None)

    def _load_and_copy(
        self,
        block: Block,
        generation: str,
        key: ArrayKey,
        tile: int,
        out: torch.Tensor,
        after: Events,
    ) -> Events:
        self._load(block, generation, key, tile)
        block.busy_until = self.device.copy_in([out], [self._elements(block, key, out)], after)
        return block.busy_until

    def _copy_and_save(
        self,
        block: Block,
        transfer: Transfer,
        generation: str,
        key: ArrayKey,
        tile: int,
        src: torch.Tensor,
        after: Events,
    ) -> None:
        done = self.device.copy_out([self._elements(block, key, src)], [src], after)
        transfer.device_done.set_result(done)
        self._save(block, generation, key, tile)

    def _elements(self, block: Block, key: ArrayKey, like: torch.Tensor) -> torch.Tensor:
        """The part of a block that holds the tile, as a tensor of the array's type."""
        return block.tensor[: self._tree.formats[key].tile_nbytes].view(like.dtype)

    def _load(self, block: Block, generation: str, key: ArrayKey, tile: int) -> None:
        """Fill a block from a file and check it."""
        chunk, offset = self._tree.locate(generation, key, tile)
        nbytes = chunk.format.tile_nbytes
        with _direct_io.open_file(chunk.path, direct=self.mode == "direct") as descriptor:
            data = block.buffer[: chunk.format.stride_nbytes]
            _direct_io.read_full(descriptor, data, offset, chunk.path)
        found = bytes(block.buffer[nbytes : nbytes + CHECKSUM_NBYTES])
        if checksum(block.buffer[:nbytes]) != found:
            raise CorruptError(
                f"tile {tile} of {key} (byte {offset} of {chunk.path}) does not match its "
                "checksum: the drive, or somebody else, changed it after it was written. Go back "
                "to a checkpoint"
            )

    def _save(self, block: Block, generation: str, key: ArrayKey, tile: int) -> None:
        """Add the checksum to a block and write both at once."""
        chunk, offset = self._tree.locate(generation, key, tile)
        nbytes = chunk.format.tile_nbytes
        block.buffer[nbytes : nbytes + CHECKSUM_NBYTES] = checksum(block.buffer[:nbytes])
        direct = self.mode == "direct"
        with _direct_io.open_file(chunk.path, write=True, direct=direct) as descriptor:
            data = block.buffer[: chunk.format.stride_nbytes]
            _direct_io.write_full(descriptor, data, offset, chunk.path)

    def _rollback(self) -> None:
        self._blocks.give_all()
        super()._rollback()


def _sets_within(cap: int | None, set_nbytes: int, most: int) -> tuple[int, int]:
    """Tiles that may be on their way in, and out: at most `most`, within the cap on host memory.

    `set_nbytes` are the host bytes that carry one tile of every array.
    """
    if cap is None:
        return most, most
    sets = cap // set_nbytes
    if sets < 2:
        raise ConfigError(
            f"the cap on page-locked memory is {cap:,} bytes; tiles of this size need at least "
            f"{2 * set_nbytes:,} (one set of blocks in, one out). Raise "
            "--optimizer-state-host-memory or choose smaller tiles (--optimizer-state-tile-numel)"
        )
    reads = min(most, sets // 2)
    return reads, min(most, sets - reads)
