"""What drives can do: files of a store read and others written over, at once, by plain calls."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.limits import Rate
from tierstore.backends._chunk_file import ChunkFile
from tierstore.backends._tree import GENERATIONS, RankTree
from tierstore.metrics import readable
from tierstore.store import TierStore
from tierstore.zarr_format import BLOCK_NBYTES

__all__ = ["DirectFiles", "FileLimit", "KvikioFiles", "Mover", "Piece", "fio_mixed"]

_MOST_FIO_NBYTES = 8 * 10**9
_HUGE_PAGE_NBYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a file that is read or written by one call: a tile with its checksum."""

    path: Path
    offset: int
    nbytes: int


class Mover(Protocol):
    """Something that reads some pieces and writes random data over others, in one way or more.

    There may be pieces of one kind only.
    """

    ways: tuple[str, ...]

    def move(self, way: str, sources: Sequence[Piece], targets: Sequence[Piece]) -> Rate:
        """Read all sources and write all targets; return when the targets are on the drive."""


class FileLimit:
    """Reads the current generation of a store and writes over the other one, tile by tile.

    Call it while the store is between steps. The generation written over is the one that the next
    step writes, every tile of it; what stands in front of the tiles is left alone. A store with
    one generation gets scratch files instead.

    Parameters
    ----------
    store
        A store of files, with something committed.
    mover
        How bytes are moved.
    """

    def __init__(self, store: TierStore, mover: Mover) -> None:
        # The files are the subject here: where they are is no part of a store's interface.
        self._tree: RankTree = store._tree  # type: ignore[attr-defined]
        self._store, self._mover = store, mover
        self._ways = mover.ways
        # One on each drive.
        self._scratch: list[Path] = []
        if store.config.recovery == "none":
            self._scratch = [path.with_name("scratch") for path in self._tree.paths]
            for directory in self._scratch:
                directory.mkdir()

    def measure(self) -> list[Rate]:
        """See `benchmarks.limits.Limit`; the first time in every way, then in the fastest one."""
        sources, targets = zip(*self._pairs(), strict=True)
        rates = {way: self._mover.move(way, sources, targets) for way in self._ways}
        self._ways = (max(rates, key=lambda way: rates[way].gb_per_s),)
        return list(rates.values())

    def one_way(self) -> tuple[Rate, Rate]:
        """See `benchmarks.limits.Limit`."""
        sources, targets = zip(*self._pairs(), strict=True)
        way = self._mover.ways[0]
        return self._mover.move(way, sources, ()), self._mover.move(way, (), targets)

    def _pairs(self) -> Iterator[tuple[Piece, Piece]]:
        """Each tile of the current generation and the place written over, in a sweep's order."""
        current, _, _ = self._tree.current()
        other = GENERATIONS[1 - GENERATIONS.index(current)]
        for name, entry in self._tree.optimizers.items():
            for tile in self._store.order(name):
                for key in entry.keys():
                    chunk, offset = self._tree.locate(current, key, tile)
                    target, _ = self._tree.locate(other, key, tile)
                    nbytes = chunk.format.stride_nbytes
                    path = self._scratch_file(chunk) if self._scratch else target.path
                    yield Piece(chunk.path, offset, nbytes), Piece(path, offset, nbytes)

    def _scratch_file(self, chunk: ChunkFile) -> Path:
        """A file of the same size on the same drive."""
        name = "-".join(chunk.path.relative_to(self._tree.paths[chunk.place]).parts)
        path = self._scratch[chunk.place] / name
        if not path.exists():
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, chunk.nbytes)
        return path

    def close(self) -> None:
        """See `benchmarks.limits.Limit`."""
        for directory in self._scratch:
            shutil.rmtree(directory)


class DirectFiles:
    """preadv and pwritev by as many threads each, past the page cache, then fdatasync.

    Parameters
    ----------
    threads
        Threads that read, and as many that write.
    direct
        Whether to open with O_DIRECT; not where the store could not.
    """

    ways: tuple[str, ...] = (
        "each thread reads or writes",
        "each thread takes a read and a write in turn",
    )

    def __init__(self, threads: int, *, direct: bool) -> None:
        self._threads = threads
        self._flags = os.O_DIRECT if direct else 0
        self._how = f"{'direct' if direct else 'buffered'} I/O by {threads} + {threads} threads"

    def move(self, way: str, sources: Sequence[Piece], targets: Sequence[Piece]) -> Rate:
        """See `Mover`."""
        with contextlib.ExitStack() as stack:
            readers = stack.enter_context(_opened(sources, os.O_RDONLY | self._flags))
            writers = stack.enter_context(_opened(targets, os.O_WRONLY | self._flags))
            reads = deque((os.preadv, readers[piece.path], piece) for piece in sources)
            writes = deque((os.pwritev, writers[piece.path], piece) for piece in targets)
            queues = [reads, writes]
            if way == self.ways[1]:
                both = deque(call for pair in zip(reads, writes, strict=True) for call in pair)
                queues = [both, both]
            buffers = _buffers(2 * self._threads, _most_nbytes((*sources, *targets)))
            # An interrupt ends the threads soon, and only then the files are closed.
            pool = stack.enter_context(ThreadPoolExecutor(2 * self._threads))
            for calls in queues:
                stack.callback(calls.clear)
            started = time.perf_counter()
            work = [
                pool.submit(_carry, queues[number % 2], buffer)
                for number, buffer in enumerate(buffers)
            ]
            for task in work:
                task.result()
            list(pool.map(os.fdatasync, writers.values()))
            return _rate(f"{self._how}, {way}", started, sources, targets)


def _most_nbytes(pieces: Iterable[Piece]) -> int:
    return max((piece.nbytes for piece in pieces), default=0)


def _carry(calls: deque[Any], buffer: memoryview) -> None:
    """Let one thread make call after call until there is none left."""
    while True:
        try:
            call, descriptor, piece = calls.popleft()
        except IndexError:
            return
        done = 0
        while done < piece.nbytes:
            count = call(descriptor, [buffer[done : piece.nbytes]], piece.offset + done)
            if count == 0:
                raise EOFError(f"{piece.path.name} ends before byte {piece.offset + piece.nbytes}")
            done += count


def _buffers(count: int, nbytes: int) -> list[memoryview]:
    """Random bytes on huge pages where there are any: a drive takes them in fewer pieces."""
    stride = -(-nbytes // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
    memory = mmap.mmap(-1, count * stride)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    random = np.random.default_rng().bytes(stride)
    for start in range(0, count * stride, stride):
        memory[start : start + stride] = random
    view = memoryview(memory)
    return [view[start : start + nbytes] for start in range(0, count * stride, stride)]


@contextlib.contextmanager
def _opened(pieces: Sequence[Piece], flags: int) -> Iterator[dict[Path, int]]:
    files: dict[Path, int] = {}
    try:
        for piece in pieces:
            if piece.path not in files:
                files[piece.path] = os.open(piece.path, flags | os.O_CLOEXEC)
        yield files
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def _rate(how: str, started: float, sources: Sequence[Piece], targets: Sequence[Piece]) -> Rate:
    return Rate(
        how=how,
        seconds=time.perf_counter() - started,
        read_nbytes=sum(piece.nbytes for piece in sources),
        written_nbytes=sum(piece.nbytes for piece in targets),
    )


class KvikioFiles:
    """kvikio's own reads and writes of device memory, with the settings that the store has made.

    Parameters
    ----------
    device
        Where the buffers are.
    depth
        Calls under way at once, each way.
    """

    ways: tuple[str, ...] = ("reads and writes at once", "reads and then writes")

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device, self._depth = device, depth

    def move(self, way: str, sources: Sequence[Piece], targets: Sequence[Piece]) -> Rate:
        """See `Mover`."""
        # Tiles alone: with the block behind them they would be a little more than one task each.
        sources, targets = _without_checksums(sources), _without_checksums(targets)
        with contextlib.ExitStack() as stack:
            readers = stack.enter_context(_kvikio_opened(sources, "r"))
            writers = stack.enter_context(_kvikio_opened(targets, "r+"))
            synced = stack.enter_context(_opened(targets, os.O_WRONLY))
            # With one thread, what is submitted second begins when the first has ended.
            pool = stack.enter_context(ThreadPoolExecutor(2 if way == self.ways[0] else 1))
            into, out = (
                _device_buffers(self._device, self._depth, pieces) for pieces in (sources, targets)
            )
            if self._device.type == "cuda":
                # kvikio does not wait for the streams that made the random data.
                torch.cuda.synchronize(self._device)
            started = time.perf_counter()
            read = pool.submit(_keep_under_way, readers, "pread", sources, into)
            write = pool.submit(_keep_under_way, writers, "pwrite", targets, out)
            read.result()
            write.result()
            for descriptor in synced.values():
                os.fdatasync(descriptor)
            return _rate(f"{_kvikio_settings()}, {way}", started, sources, targets)


def _kvikio_settings() -> str:
    from kvikio import defaults

    threads, task_nbytes = defaults.get("num_threads"), defaults.get("task_size")
    return f"kvikio ({threads} threads, tasks of {readable(task_nbytes)})"


@contextlib.contextmanager
def _kvikio_opened(pieces: Sequence[Piece], flags: str) -> Iterator[dict[Path, Any]]:
    import kvikio

    with contextlib.ExitStack() as stack:
        paths = dict.fromkeys(piece.path for piece in pieces)
        yield {path: stack.enter_context(kvikio.CuFile(path, flags)) for path in paths}


def _without_checksums(pieces: Sequence[Piece]) -> list[Piece]:
    return [Piece(piece.path, piece.offset, piece.nbytes - BLOCK_NBYTES) for piece in pieces]


def _device_buffers(
    device: torch.device, depth: int, pieces: Sequence[Piece]
) -> list[torch.Tensor]:
    """Random bytes for `depth` calls, each part starting at a multiple of 4096."""
    nbytes = -(-_most_nbytes(pieces) // 4096) * 4096
    memory = torch.randint(0, 256, (depth * nbytes + 4096,), dtype=torch.uint8, device=device)
    skip = -memory.data_ptr() % 4096
    return list(memory[skip : skip + depth * nbytes].split(nbytes)) if nbytes else []


def _keep_under_way(
    files: dict[Path, Any], call: str, pieces: Sequence[Piece], buffers: Sequence[torch.Tensor]
) -> None:
    """Start call after call, and never more at once than there are buffers."""
    pending: deque[tuple[Any, Piece]] = deque()
    try:
        for number, piece in enumerate(pieces):
            if len(pending) == len(buffers):
                _expect_whole(*pending.popleft())
            start = getattr(files[piece.path], call)
            buffer = buffers[number % len(buffers)]
            pending.append((start(buffer, size=piece.nbytes, file_offset=piece.offset), piece))
        while pending:
            _expect_whole(*pending.popleft())
    finally:
        # Buffers must outlive the calls that use them, also when another call has failed.
        for future, _ in pending:
            with contextlib.suppress(Exception):
                future.get()


def _expect_whole(future: Any, piece: Piece) -> None:
    count = future.get()
    if count != piece.nbytes:
        raise EOFError(f"kvikio moved {count} of {piece.nbytes} bytes of {piece.path.name}")


def fio_mixed(directory: Path, nbytes: int, threads: int, block_nbytes: int) -> Rate | None:
    """What fio says of direct reads and writes at once; None where there is no fio.

    Parameters
    ----------
    directory
        Where it makes scratch files, at most 8 GB or half of what is free, and removes them.
    nbytes
        Bytes of the files, of which one half is read and the other written over.
    threads
        Half of its jobs: they are as many as a store has threads.
    block_nbytes
        Bytes of a call.

    Raises
    ------
    subprocess.CalledProcessError
        fio failed.
    """
    fio = shutil.which("fio")
    if fio is None:
        return None
    libaio = subprocess.run([fio, "--enghelp=libaio"], capture_output=True, check=False)
    engine = "psync" if libaio.returncode else "libaio"
    nbytes = min(nbytes, _MOST_FIO_NBYTES, shutil.disk_usage(directory).free // 2)
    job_nbytes = max(nbytes // (2 * threads) // block_nbytes, 1) * block_nbytes
    scratch = directory / "fio-scratch"
    scratch.mkdir()
    try:
        output = subprocess.run(
            [
                fio,
                "--name=mixed",
                f"--directory={scratch}",
                f"--ioengine={engine}",
                "--iodepth=4",
                "--direct=1",
                "--rw=rw",
                f"--bs={block_nbytes}",
                f"--size={job_nbytes}",
                f"--numjobs={2 * threads}",
                "--thread",
                # Written once before the measurement: overwriting is what a step does.
                "--overwrite=1",
                "--refill_buffers",
                "--end_fsync=1",
                "--group_reporting",
                "--output-format=json",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    finally:
        shutil.rmtree(scratch)
    job = json.loads(output[output.index("{") :])["jobs"][0]
    read_nbytes, written_nbytes = int(job["read"]["io_bytes"]), int(job["write"]["io_bytes"])
    return Rate(
        how=f"fio {engine}, direct, rw=rw, {2 * threads} jobs",
        seconds=(read_nbytes + written_nbytes)
        / (job["read"]["bw_bytes"] + job["write"]["bw_bytes"]),
        read_nbytes=read_nbytes,
        written_nbytes=written_nbytes,
    )
