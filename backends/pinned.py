"""The ``cpu`` tier: every tile in one slab of host memory, page-locked where there is CUDA."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tierstore.answers import Capabilities, Probe
from tierstore.backends import _direct_io
from tierstore.backends._host_memory import HostSlab
from tierstore.backends._io_threads import IoThreads
from tierstore.backends._tree import RankTree
from tierstore.errors import ConfigError
from tierstore.metrics import readable
from tierstore.records import ArrayKey, Commit, Identity
from tierstore.store import TierStore
from tierstore.transfer import Transfer
from tierstore.zarr_format import BLOCK_NBYTES, CHECKSUM_NBYTES, checksum

if TYPE_CHECKING:
    import torch

    from tierstore.config import TierConfig
    from tierstore.device import Device, Events

__all__ = ["PinnedStore"]

_WRITES_AHEAD = 4


class PinnedStore(TierStore):
    """State in host memory, copied straight between the slab and the window.

    There is one generation: an error in the middle of a step loses it. What must last is a
    snapshot, which writes the same files as the file tiers.
    """

    tier: ClassVar[str] = "cpu"
    capabilities = Capabilities(durable=False, rollback=False)

    def __init__(self, config: TierConfig, device: Device, identity: Identity) -> None:
        super().__init__(config, device, identity)
        self._resources = contextlib.ExitStack()

    @classmethod
    def probe(cls, config: TierConfig, device: Device) -> Probe:
        """See `TierStore`."""
        mode = "page-locked" if device.asynchronous else "pageable"
        return Probe(tier=cls.tier, ok=True, mode=mode)

    def _allocate(self) -> None:
        self._starts: dict[ArrayKey, int] = {}
        nbytes = 0
        for entry in self.optimizers.values():
            for key in entry.keys():
                self._starts[key] = nbytes
                nbytes += entry.layout.n_tiles * entry.formats[key.name].tile_nbytes
        cap = self.config.host_memory_nbytes
        if cap is not None and nbytes > cap:
            raise ConfigError(
                f"{self}: the state is {nbytes:,} bytes ({readable(nbytes)}), and "
                f"--optimizer-state-host-memory allows {cap:,}. Raise it, or choose a file tier"
            )
        # A rank may own nothing of an optimizer; a slab needs a byte.
        self._slab = HostSlab(max(nbytes, BLOCK_NBYTES), self.device, self._chunk_starts())
        self._resources.callback(self._slab.close)
        self.host_nbytes = self._slab.nbytes
        self.mode = self.probe(self.config, self.device).mode
        # No blocks are needed on the way. The bound keeps short what is queued on a device, and
        # is far enough ahead for it never to wait for the host.
        self.write_sets = _WRITES_AHEAD * self.config.slots
        # A device's copies are queued by the caller's thread, and only their ends are waited for.
        threads = 1 if self.device.asynchronous else self.config.io_threads
        self._copiers = IoThreads(threads, "tierstore-copy")
        self._resources.callback(self._copiers.close)

    def _chunk_starts(self) -> Iterator[int]:
        for key, start in self._starts.items():
            layout = self.optimizers[key.optimizer].layout
            tile_nbytes = self.optimizers[key.optimizer].formats[key.name].tile_nbytes
            for chunk in range(layout.n_chunks):
                yield start + chunk * layout.tiles_per_chunk * tile_nbytes

    def _begin(self) -> None:
        """Nothing to do: what is written takes the place of what was there."""

    def _read(self, key: ArrayKey, tile: int, out: torch.Tensor, after: Events) -> Transfer:
        places = [self._place(key, tile, out)]
        return self._start(partial(self.device.copy_in, [out], places, after))

    def _write(self, key: ArrayKey, tile: int, src: torch.Tensor, after: Events) -> Transfer:
        places = [self._place(key, tile, src)]
        return self._start(partial(self.device.copy_out, places, [src], after))

    def _read_tile(
        self, keys: Sequence[ArrayKey], tile: int, outs: Mapping[str, torch.Tensor], after: Events
    ) -> Transfer:
        tensors = [outs[key.name] for key in keys]
        places = [self._place(key, tile, outs[key.name]) for key in keys]
        return self._start(partial(self.device.copy_in, tensors, places, after))

    def _write_tile(
        self, keys: Sequence[ArrayKey], tile: int, srcs: Mapping[str, torch.Tensor], after: Events
    ) -> Transfer:
        tensors = [srcs[key.name] for key in keys]
        places = [self._place(key, tile, srcs[key.name]) for key in keys]
        return self._start(partial(self.device.copy_out, places, tensors, after))

    def _start(self, copy: Callable[[], Events]) -> Transfer:
        transfer = Transfer()
        if self.device.asynchronous:
            done = copy()
            transfer.device_done.set_result(done)
            self._copiers.submit(self._settle_after, transfer, partial(_synchronize, done))
        else:
            self._copiers.submit(self._settle_after, transfer, copy)
        return transfer

    @staticmethod
    def _settle_after(transfer: Transfer, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # the transfer reports it
            transfer.fail(error)
        else:
            if not transfer.device_done.done():
                transfer.device_done.set_result(())
            transfer.settled.set_result(None)

    def _bytes(self, key: ArrayKey, tile: int) -> slice:
        nbytes = self.optimizers[key.optimizer].formats[key.name].tile_nbytes
        start = self._starts[key] + tile * nbytes
        return slice(start, start + nbytes)

    def _place(self, key: ArrayKey, tile: int, like: torch.Tensor) -> torch.Tensor:
        return self._slab.tensor[self._bytes(key, tile)].view(like.dtype)

    def _commit(self, commit: Commit) -> None:
        """Nothing to do: the slab is the state."""

    def _snapshot(self, target: Path, commit: Commit) -> None:
        tree = RankTree(target / self.identity.directory_name, self.optimizers)
        with tree.of_one_generation(self.identity, self.config.role, commit) as generation:
            direct = not _direct_io.direct_io_refused(tree.path)
            trailer = mmap.mmap(-1, BLOCK_NBYTES)
            for key in tree.formats:
                for tile in range(self.optimizers[key.optimizer].layout.n_tiles):
                    place = self._bytes(key, tile)
                    data = self._slab.buffer(place.start, place.stop - place.start)
                    trailer[:CHECKSUM_NBYTES] = checksum(data)
                    chunk, offset = tree.locate(generation, key, tile)
                    with _direct_io.open_file(chunk.path, write=True, direct=direct) as descriptor:
                        _direct_io.write_full(descriptor, data, offset, chunk.path)
                        _direct_io.write_full(
                            descriptor, memoryview(trailer), offset + len(data), chunk.path
                        )
            for chunk in tree.chunks(generation):
                _direct_io.sync_data(chunk.path)

    def _close(self, discard: bool) -> None:
        self._resources.close()


def _synchronize(events: Events) -> None:
    for event in events:
        event.synchronize()
