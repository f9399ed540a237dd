"""The ``gds`` tier: chunk files, read and written by kvikio straight from and to device memory."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tierstore.answers import Probe
from tierstore.backends import _direct_io
from tierstore.backends._chunk_file import ChunkFile
from tierstore.backends._device_checksum import ChecksumLane, DeviceChecksum
from tierstore.backends._file_store import FileStore
from tierstore.backends._gds_mode import gpudirect_refused, what_is_missing
from tierstore.backends._host_memory import Block, BlockPool
from tierstore.backends._io_threads import IoThreads
from tierstore.errors import (
    CapacityError,
    ConfigError,
    CorruptError,
    StateError,
    TierStoreError,
    TransferError,
)
from tierstore.transfer import Transfer
from tierstore.zarr_format import BLOCK_NBYTES, CHECKSUM_NBYTES

if TYPE_CHECKING:
    import torch

    from tierstore.config import TierConfig
    from tierstore.device import Device, Events
    from tierstore.records import ArrayKey

__all__ = ["GdsStore"]

_logger = logging.getLogger("tierstore.gds")

_TASK_NBYTES = 16 * 2**20
_LEAST_BOUNCE_NBYTES = 2**20
_OPEN_FILES = 32
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class _Lane:
    """What one transfer at a time needs for its checksum, on the device and on the host."""

    checksum: ChecksumLane
    trailer: Block


class GdsStore(FileStore):
    """State in the same files as the nvme tier, moved between drive and window by kvikio.

    With GPUDirect Storage the bytes never pass the processor; without it kvikio moves them through
    page-locked buffers of its own (compatibility mode), and `mode` says which it is. Checksums are
    made and checked on the device, so that either tier opens what the other has written.

    kvikio's threads, task size and mode belong to the process: the store sets them when it starts
    and puts them back when it is closed.

    Parameters
    ----------
    config, device, identity
        See `FileStore`.
    """

    tier: ClassVar[str] = "gds"

    @classmethod
    def probe(cls, config: TierConfig, device: Device) -> Probe:
        """See `TierStore`."""
        probe = super().probe(config, device)
        if not probe.ok:
            return probe
        missing = ""
        if device.torch_device.type != "cuda":
            missing = f"the tensors are on {device.torch_device}; GPUDirect Storage is CUDA's"
        else:
            try:
                import cupy  # noqa: F401
                import kvikio  # noqa: F401
            except ImportError as error:
                missing = f"{error}; install tierstore[gds-cu12] or tierstore[gds-cu13]"
        if missing:
            return replace(probe, ok=False, mode="none", reason=missing)
        refused = _gpudirect_refused(config, device)
        if not refused:
            return replace(probe, mode="gpudirect", reason="")
        if config.gds == "require":
            return replace(probe, ok=False, mode="none", reason=refused)
        return replace(probe, mode="compatibility", reason=refused)

    def _start(self, refused: str) -> None:
        import kvikio
        import kvikio.defaults

        why = _gpudirect_refused(self.config, self.device)
        if why and self.config.gds == "require":
            raise ConfigError(f"--optimizer-state-gds=require: {why}")
        self.mode = "compatibility" if why else "gpudirect"
        _logger.info(
            "%s: %s",
            self,
            f"kvikio's compatibility mode, through host memory: {why}"
            if why
            else "GPUDirect Storage",
        )
        self._direct = not refused
        if refused:
            _logger.warning("%s: %s; reading and writing through the page cache", self, refused)
        threads = 2 * self._n_threads
        settings: dict[str, Any] = {
            "compat_mode": kvikio.CompatMode.ON if why else kvikio.CompatMode.OFF,
            "num_threads": threads,
            "task_size": _TASK_NBYTES,
            # Smaller transfers would go by the calling thread and through host memory.
            "gds_threshold": 0,
            "auto_direct_io_read": self._direct,
            "auto_direct_io_write": self._direct,
        }
        if why:
            settings["bounce_buffer_size"] = bounce_nbytes = self._bounce_nbytes(threads)
            self.host_nbytes = bounce_nbytes * threads
        self._resources.enter_context(kvikio.defaults.set(settings))
        longest = max(form.tile_nbytes for form in self._tree.formats.values())
        self._checksum = DeviceChecksum(longest, self.device.torch_device.index)
        self._lanes = deque(self._make_lanes(threads))
        # A file that falls out is closed when the last transfer that holds it has ended.
        self._file = lru_cache(maxsize=_OPEN_FILES)(_open)
        self._resources.callback(self._file.cache_clear)
        self._readers = IoThreads(self._n_threads, "tierstore-read")
        self._resources.callback(self._readers.close)
        self._writers = IoThreads(self._n_threads, "tierstore-write")
        self._resources.callback(self._writers.close)

    def _bounce_nbytes(self, threads: int) -> int:
        """Bytes of each of the buffers that kvikio moves tiles through, within the user's cap."""
        cap = self.config.host_memory_nbytes
        nbytes = _TASK_NBYTES if cap is None else min(_TASK_NBYTES, cap // threads - BLOCK_NBYTES)
        if nbytes < _LEAST_BOUNCE_NBYTES:
            least = threads * (_LEAST_BOUNCE_NBYTES + BLOCK_NBYTES)
            raise ConfigError(
                f"the cap on page-locked memory is {cap:,} bytes; in compatibility mode the gds "
                f"tier needs at least {least:,} (1 MiB and a block for each of {threads} threads). "
                "Raise --optimizer-state-host-memory or lower --optimizer-state-io-threads"
            )
        return nbytes // BLOCK_NBYTES * BLOCK_NBYTES

    def _make_lanes(self, count: int) -> Iterator[_Lane]:
        trailers = BlockPool(count, BLOCK_NBYTES, self.device)
        self._resources.callback(trailers.close)
        self.host_nbytes += trailers.nbytes
        for _ in range(count):
            yield _Lane(ChecksumLane(self.device.torch_device.index), trailers.take())

    def _files_replaced(self) -> None:
        # They are kept by name, and a file that is frozen must not be written by its former one.
        self._file.cache_clear()

    def _run_all(self, function: Callable[[Any], None], items: Iterable[Any]) -> None:
        self._writers.run_all(function, items)

    def _read(self, key: ArrayKey, tile: int, out: torch.Tensor, after: Events) -> Transfer:
        if self._current is None:
            raise StateError(f"{self}: there is no current generation")
        return self._submit(self._readers, self._load, self._current, key, tile, out, after)

    def _write(self, key: ArrayKey, tile: int, src: torch.Tensor, after: Events) -> Transfer:
        return self._submit(self._writers, self._save, self._target, key, tile, src, after)

    def _submit(self, threads: IoThreads, work: Callable[..., None], *arguments: Any) -> Transfer:
        transfer = Transfer()
        threads.submit(self._carry, transfer, work, *arguments)
        return transfer

    # In the I/O threads. kvikio knows nothing of streams: what it is given must be complete, and
    # when it is done so is the tile, for everybody.

    def _carry(
        self,
        transfer: Transfer,
        work: Callable[..., None],
        generation: str,
        key: ArrayKey,
        tile: int,
        tensor: torch.Tensor,
        after: Events,
    ) -> None:
        import torch

        lane = self._lanes.popleft()  # as many as there are threads
        try:
            for event in after:
                event.synchronize()
            chunk, offset = self._tree.locate(generation, key, tile)
            work(lane, chunk, offset, tensor.view(-1).view(torch.uint8), f"tile {tile} of {key}")
        except BaseException as error:  # the transfer reports it
            self._lanes.append(lane)
            transfer.fail(error)
            return
        self._lanes.append(lane)
        transfer.device_done.set_result(())
        transfer.settled.set_result(None)

    def _load(
        self, lane: _Lane, chunk: ChunkFile, offset: int, data: torch.Tensor, what: str
    ) -> None:
        with _named("reading", offset, chunk):
            file = self._file(chunk.path, "r")
            with _until_done(file.pread(data, file_offset=offset), data.numel()):
                self._move_trailer(lane, chunk, offset, write=False)
        if self._checksum_of(data, lane) != bytes(lane.trailer.buffer[:CHECKSUM_NBYTES]):
            raise CorruptError(
                f"{what} (byte {offset} of {chunk.path}) does not match its checksum: the drive, "
                "or somebody else, changed it after it was written. Go back to a checkpoint"
            )

    def _save(
        self, lane: _Lane, chunk: ChunkFile, offset: int, data: torch.Tensor, what: str
    ) -> None:
        with _named("writing", offset, chunk):
            file = self._file(chunk.path, "r+")
            with _until_done(file.pwrite(data, file_offset=offset), data.numel()):
                lane.trailer.buffer[:CHECKSUM_NBYTES] = self._checksum_of(data, lane)
                self._move_trailer(lane, chunk, offset, write=True)

    def _checksum_of(self, data: torch.Tensor, lane: _Lane) -> bytes:
        return self._checksum.of(data, lane.checksum)

    def _move_trailer(self, lane: _Lane, chunk: ChunkFile, offset: int, *, write: bool) -> None:
        """Read or write the block behind a tile, which starts with the tile's checksum."""
        place = offset + chunk.format.tile_nbytes
        move = _direct_io.write_full if write else _direct_io.read_full
        with _direct_io.open_file(chunk.path, write=write, direct=self._direct) as descriptor:
            move(descriptor, lane.trailer.buffer, place, chunk.path)


def _gpudirect_refused(config: TierConfig, device: Device) -> str:
    """Why GPUDirect Storage can't be used, with what is missing; empty if it can."""
    for directory in config.directories:
        if refused := gpudirect_refused(directory.absolute(), device.torch_device.index):
            missing = "; ".join(what_is_missing(directory))
            return f"GPUDirect Storage does not work in {directory} ({refused}): {missing}"
    return ""


def _open(path: Path, flags: str) -> Any:
    """A chunk file as kvikio's object; links are not followed."""
    import kvikio

    with _direct_io.open_file(path, write=flags != "r"):
        return kvikio.CuFile(path, flags)


@contextlib.contextmanager
def _until_done(future: Any, nbytes: int) -> Iterator[None]:
    """Do something else, and whatever comes of it, end only when kvikio is done with the slot."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            future.get()
        raise
    count = future.get()
    if count != nbytes:
        raise OSError(errno.EIO, f"{count} of {nbytes} bytes were moved")


@contextlib.contextmanager
def _named(what: str, offset: int, chunk: ChunkFile) -> Iterator[None]:
    """Turn what kvikio raises into a typed error that names the file."""
    try:
        yield
    except TierStoreError:
        raise
    except Exception as error:
        # kvikio's exceptions have no errno; their text has the system's words.
        code = next((code for code in _NO_ROOM if os.strerror(code) in str(error)), errno.EIO)
        message = f"{what} at byte {offset} of {chunk.path} with kvikio: {error}"
        raise (CapacityError if code in _NO_ROOM else TransferError)(code, message) from error
