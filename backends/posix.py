"""The ``nvme`` tier: chunk files, direct I/O, a pool of threads each for reads and for writes."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tierstore.backends import _direct_io
from tierstore.backends._host_memory import Block, BlockPool
from tierstore.backends._io_threads import IoThreads
from tierstore.backends._tree import (
    GENERATIONS,
    Lease,
    RankTree,
)
from tierstore.errors import ConfigError, CorruptError, StateError, TierStoreError
from tierstore.records import ArrayKey, Commit, Identity
from tierstore.store import Capabilities, Probe, TierStore, Transfer
from tierstore.zarr_format import CHECKSUM_NBYTES, checksum

if TYPE_CHECKING:
    import torch

    from tierstore.config import TierConfig
    from tierstore.device import Device, Event

__all__ = ["PosixStore"]

_logger = logging.getLogger("tierstore.nvme")


class PosixStore(TierStore):
    """State in files on a local drive, read and written past the page cache.

    Every tile passes through a page-locked block. A read fills the block, checks the crc32c and
    queues the copy to the device; a write queues the copy to the block, adds the crc32c and
    writes both at once. Two generations of files take turns, so that overwriting one leaves the
    other whole, and no file is ever made anew.

    Parameters
    ----------
    config, device, identity
        See `TierStore`; ``config.directory`` must be set. The rank's directory is
        ``<directory>/<role>-<nonce>/rank-<rank>``.
    """

    tier: ClassVar[str] = "nvme"

    def __init__(self, config: TierConfig, device: Device, identity: Identity) -> None:
        if config.directory is None:
            raise ConfigError("the nvme tier needs a directory: --optimizer-state-dir")
        super().__init__(config, device, identity)
        self.capabilities = Capabilities(durable=True, rollback=config.recovery == "step")
        # Absolute: a trainer may change its working directory.
        root = Path(config.directory).absolute() / f"{config.role}-{identity.nonce}"
        self.path = root / identity.directory_name
        self._made = False
        # What each generation holds; the current one is the one that holds `committed`.
        self._holds: dict[str, Commit] = {}
        self._doubted: Commit | None = None
        self._target = GENERATIONS[0]
        self._resources = contextlib.ExitStack()

    @classmethod
    def probe(cls, config: TierConfig, device: Device) -> Probe:
        """See `TierStore`."""
        if config.directory is None:
            return Probe(tier=cls.tier, ok=False, mode="none", reason="no directory was given")
        try:
            _direct_io.make_directories(config.directory)
            refused = _direct_io.direct_io_refused(config.directory)
            usage = shutil.disk_usage(config.directory)
        except OSError as error:
            reason = error.strerror or str(error)
            return Probe(tier=cls.tier, ok=False, mode="none", reason=reason)
        return Probe(
            tier=cls.tier,
            ok=True,
            mode="buffered" if refused else "direct",
            reason=refused,
            details={"free_nbytes": usage.free},
        )

    def _allocate(self) -> None:
        probe = self.probe(self.config, self.device)
        if not probe.ok:
            raise ConfigError(
                f"the nvme tier can't run in {self.config.directory}: {probe.reason}. Choose a "
                "directory on a local drive that you may write to (--optimizer-state-dir)"
            )
        self._tree = RankTree(self.path, self.optimizers)
        generations = GENERATIONS[: 2 if self.config.recovery == "step" else 1]
        self._tree.require_space(len(generations))
        earlier = self._tree.earlier_runs()
        if earlier and self.identity.rank == 0:
            _logger.info(
                "%s: %d stores of other runs are in %s and stay untouched (%s); remove those of "
                "runs that have ended",
                self,
                len(earlier),
                self.config.directory,
                ", ".join(earlier[:5]),
            )
        # Blocks first: their errors come before anything is on the drive.
        self._start(probe.reason)
        try:
            self._tree.create(self.identity, self.config.role)
            try:
                self._resources.callback(Lease(self.path).close)
                for generation in generations:
                    self._tree.create_generation(generation)
                self._made = True
            except BaseException:
                # Only what this call made: the directory was made by it, and by nobody else.
                self._tree.remove()
                raise
        except BaseException:
            self._resources.close()
            raise

    def open(self, path: Path) -> None:
        """See `TierStore`."""
        self._require("new")
        self.path = Path(path).absolute()
        self.config = replace(self.config, directory=self.path.parents[1])
        self._tree, self.identity = RankTree.load(self.path)
        self.optimizers = dict(self._tree.optimizers)
        try:
            self._resources.callback(Lease(self.path).close)
            self._tree.remove_leftovers()
            current, commit, _ = self._tree.current()
            if self.capabilities.rollback and self._other(current) is None:
                raise StateError(
                    f"{self.path} was made with --optimizer-state-recovery=none and has room for "
                    "one generation only; open it with the same setting"
                )
            chunk = next(self._tree.chunks(current), None)
            self._start("" if chunk is None else _direct_io.direct_opening_refused(chunk.path))
        except BaseException:
            self._resources.close()
            raise
        self._holds[current] = self.committed = commit
        self._phase = "idle"

    def _other(self, generation: str) -> str | None:
        other = GENERATIONS[1 - GENERATIONS.index(generation)]
        return other if (self.path / other).is_dir() else None

    @property
    def _current(self) -> str | None:
        return next((name for name, held in self._holds.items() if held is self.committed), None)

    def _start(self, refused: str) -> None:
        """Take blocks and threads; `refused` says why direct I/O can't be used, if it can't."""
        self.mode = "buffered" if refused else "direct"
        if refused:
            _logger.warning(
                "%s: %s in %s; reading and writing through the page cache, which is slower and "
                "takes host memory. Use a local ext4 or xfs file system",
                self,
                refused,
                self.config.directory,
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
        self._readers = IoThreads(self.config.io_threads, "tierstore-read")
        self._resources.callback(self._readers.close)
        self._writers = IoThreads(self.config.io_threads, "tierstore-write")
        self._resources.callback(self._writers.close)

    def _begin(self) -> None:
        current = self._current
        if current is not None and self.committed is not None:
            if self._doubted not in (None, self.committed):
                # A commit failed half way: on the drive either generation may be the current one.
                # The one that is not about to be overwritten must be.
                self._tree.finish(current, self.committed, self.identity.nonce)
            self._doubted = None
        if current is None:
            self._target = GENERATIONS[0]
        elif self.capabilities.rollback:
            self._target = GENERATIONS[1 - GENERATIONS.index(current)]
        else:
            self._target = current
        # On the drive before the first overwrite: after a crash the record must not say that a
        # half overwritten generation is whole.
        self._tree.write_record(self._target, {"state": "writing"})

    def _read(
        self, key: ArrayKey, tile: int, out: torch.Tensor, after: Sequence[Event]
    ) -> Transfer:
        transfer = Transfer()
        work = self._load_and_copy, self._current, key, tile, out, after
        self._readers.submit(self._carry, transfer, self._take(), *work)
        return transfer

    def _write(
        self, key: ArrayKey, tile: int, src: torch.Tensor, after: Sequence[Event]
    ) -> Transfer:
        transfer, block = Transfer(), self._take()
        work: tuple[Any, ...] = self._save, self._target, key, tile
        if self.device.asynchronous:
            # Queued by the caller's thread, so that the event exists when this returns.
            if block.busy_until is not None:
                after = [*after, block.busy_until]
            try:
                block.busy_until = self.device.copy_out(self._elements(block, key, src), src, after)
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
        self, transfer: Transfer, block: Block, work: Callable[..., Event], *arguments: Any
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
        after: Sequence[Event],
    ) -> Event:
        self._load(block, generation, key, tile)
        block.busy_until = self.device.copy_in(out, self._elements(block, key, out), after)
        return block.busy_until

    def _copy_and_save(
        self,
        block: Block,
        transfer: Transfer,
        generation: str,
        key: ArrayKey,
        tile: int,
        src: torch.Tensor,
        after: Sequence[Event],
    ) -> None:
        done = self.device.copy_out(self._elements(block, key, src), src, after)
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

    def _commit(self, commit: Commit) -> None:
        paths = [chunk.path for chunk in self._tree.chunks(self._target)]
        self._writers.run_all(_direct_io.sync_data, paths)
        self._doubted = commit
        self._tree.finish(self._target, commit, self.identity.nonce)
        self._holds[self._target] = commit
        # For people only: where the link can't be made nothing is lost.
        with contextlib.suppress(TierStoreError):
            _direct_io.replace_link(self.path / "current", self._target)

    def _rollback(self) -> None:
        self._blocks.give_all()

    def _snapshot(self, target: Path, commit: Commit) -> None:
        if self._current is None:
            raise StateError(f"{self}: there is no current generation")
        tree = RankTree(target / self.identity.directory_name, self.optimizers)
        with tree.of_one_generation(self.identity, self.config.role, commit) as generation:
            for source, copy in zip(
                self._tree.chunks(self._current), tree.chunks(generation), strict=True
            ):
                _direct_io.copy_data(source.path, copy.path, source.nbytes)

    def _close(self, discard: bool) -> None:
        # While the lease is still held, so that nobody else can have taken the directory up.
        if discard and self._made:
            self._tree.remove()
        self._resources.close()


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
