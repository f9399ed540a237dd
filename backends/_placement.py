"""Which directory holds which chunk: free space, measured bandwidth, shares, order of a sweep."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tierstore.backends import _direct_io
from tierstore.backends._io_threads import IoThreads
from tierstore.errors import CapacityError
from tierstore.layout import StateLayout
from tierstore.metrics import readable
from tierstore.records import OptimizerLayout

__all__ = [
    "earlier_runs",
    "free_nbytes",
    "interleave",
    "measure",
    "place_chunks",
    "report",
    "require_space",
    "share_out",
    "sweep_order",
]

_logger = logging.getLogger("tierstore.files")

_SCRATCH_NBYTES = 128 * 2**20
_BLOCK_NBYTES = 4 * 2**20
_LIMIT_S = 0.5
_THREADS_PER_DIRECTORY = 4


def require_space(
    paths: Sequence[Path], optimizers: Mapping[str, OptimizerLayout], n_generations: int
) -> None:
    """Refuse before anything is made what can't fit.

    Parameters
    ----------
    paths
        The rank's directory on each drive; none of them needs to exist.
    optimizers, n_generations
        What is to be stored, and how often.

    Raises
    ------
    CapacityError
        With the bytes needed and the bytes free.
    """
    nbytes = n_generations * sum(
        entry.layout.n_chunks * form.header_nbytes + entry.layout.n_tiles * form.stride_nbytes
        for entry in optimizers.values()
        for form in entry.formats.values()
    )
    places = [_existing(path) for path in paths]
    # Directories of one file system have one space.
    free = {os.stat(place).st_dev: free_nbytes(place) for place in places}
    total_nbytes = sum(free.values())
    if nbytes <= total_nbytes:
        return
    where = " and ".join(str(path.parents[1]) for path in paths)
    runs = earlier_runs(paths)
    beside = f", beside the stores of {len(runs)} other runs ({', '.join(runs[:5])})"
    raise CapacityError(
        errno.ENOSPC,
        f"{paths[0]} needs {nbytes:,} bytes ({readable(nbytes)}) for {n_generations} "
        f"generation(s) of optimizer state, and {total_nbytes:,} ({readable(total_nbytes)}) "
        f"are free in {where}{beside if runs else ''}. Free space or choose another "
        "--optimizer-state-dir; --optimizer-state-recovery=none needs one generation only",
    )


def earlier_runs(paths: Sequence[Path]) -> list[str]:
    """Names of the stores of other runs beside these directories of a rank."""
    roots = {path.parent for path in paths}
    found = {
        generation.parents[1] for root in roots for generation in root.parent.glob("*/rank-*/gen-a")
    }
    return sorted({root.name for root in found - roots})


def _existing(path: Path) -> Path:
    while not path.is_dir():
        path = path.parent
    return path


def free_nbytes(directory: Path) -> int:
    """Bytes that may still be written in an existing directory."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def place_chunks(
    optimizers: Mapping[str, OptimizerLayout],
    directories: Sequence[Path],
    n_generations: int,
    rates: Sequence[float],
) -> dict[str, list[int]]:
    """Spread the chunks of each optimizer over directories.

    Parameters
    ----------
    optimizers, n_generations
        What is to be stored, and how often.
    directories
        They exist.
    rates
        Bytes per second of each directory; each gets chunks in proportion, as long as it has room.

    Returns
    -------
    dict
        Optimizer name to the number of a directory for each chunk.

    Raises
    ------
    CapacityError
        So many whole chunks do not fit.
    """
    devices = [os.stat(directory).st_dev for directory in directories]
    # Directories of one file system divide its space.
    free = [
        free_nbytes(directory) // devices.count(device)
        for directory, device in zip(directories, devices, strict=True)
    ]
    places = {}
    for entry in optimizers.values():
        layout = entry.layout
        nbytes = n_generations * sum(
            form.file_nbytes(layout.tiles_per_chunk) for form in entry.formats.values()
        )
        rooms = [left // nbytes for left in free]
        if sum(rooms) < layout.n_chunks:
            raise CapacityError(
                errno.ENOSPC,
                f"{layout.n_chunks} chunks of {entry.name}, {nbytes:,} bytes each, do not fit "
                "whole into what is free: "
                + ", ".join(
                    f"{left:,} bytes ({readable(left)}) in {directory}"
                    for directory, left in zip(directories, free, strict=True)
                )
                + ". Free space, or choose smaller chunks (--optimizer-state-chunk-numel) or "
                "other directories (--optimizer-state-dir)",
            )
        counts = share_out(layout.n_chunks, rates, rooms)
        free = [left - count * nbytes for left, count in zip(free, counts, strict=True)]
        places[entry.name] = interleave(counts)
    return places


def share_out(count: int, weights: Sequence[float], limits: Sequence[int]) -> list[int]:
    """Whole numbers that sum to `count`, in proportion to `weights`, none above its limit.

    Those that are below their limits are within one of their exact shares of what the others leave.

    Parameters
    ----------
    count
        At most the sum of `limits`.
    weights
        Positive.
    limits
        The most of each.
    """
    shares = list(limits)
    below = set(range(len(weights)))
    while True:
        left = count - sum(limit for index, limit in enumerate(limits) if index not in below)
        total = sum(weights[index] for index in below)
        exact = {index: left * weights[index] / total for index in below}
        found = {index: int(exact[index]) for index in below}
        # What rounding down leaves over goes to those that lost most by it.
        loss = sorted(below, key=lambda index: (found[index] - exact[index], index))
        for index in loss[: left - sum(found.values())]:
            found[index] += 1
        full = {index for index in below if found[index] > limits[index]}
        if not full:
            for index in below:
                shares[index] = found[index]
            return shares
        below -= full


def interleave(counts: Sequence[int]) -> list[int]:
    """Each index as often as its count says, spread evenly over the list.

    Examples
    --------
    >>> interleave([4, 2, 0])
    [0, 1, 0, 0, 1, 0]
    """
    turns = sorted(
        ((turn + 0.5) / count, index) for index, count in enumerate(counts) for turn in range(count)
    )
    return [index for _, index in turns]


def sweep_order(layout: StateLayout, places: Sequence[int]) -> list[int]:
    """All tiles, so that each directory's come in ascending order and evenly spread."""
    tiles: list[list[int]] = [[] for _ in range(max(places, default=0) + 1)]
    for tile in range(layout.n_tiles):
        tiles[places[tile // layout.tiles_per_chunk]].append(tile)
    waiting = [iter(found) for found in tiles]
    return [next(waiting[place]) for place in interleave([len(found) for found in tiles])]


def report(
    directories: Sequence[Path],
    places: Mapping[str, Sequence[int]],
    rates: Sequence[float],
    slots: int,
) -> None:
    """Log what each directory showed and got, and warn of what does not help."""
    counts = Counter(place for by_chunk in places.values() for place in by_chunk)
    _logger.info(
        "chunks are spread by measured bandwidth: %s",
        ", ".join(
            f"{directory} {rate / 1e9:.2f} GB/s {counts[number]} of {counts.total()} chunks"
            for number, (directory, rate) in enumerate(zip(directories, rates, strict=True))
        ),
    )
    for number, directory in enumerate(directories):
        if not counts[number]:
            _logger.warning(
                "%s gets no chunk: it is too slow beside the others (%.3f GB/s) or has no room",
                directory,
                rates[number] / 1e9,
            )
    if slots < 2 * len(directories):
        _logger.warning(
            "%d tiles in device memory can't keep %d directories busy, which needs one on its way "
            "in and one on its way out for each: --optimizer-state-slots=%d or more",
            slots,
            len(directories),
            2 * len(directories),
        )
    devices: dict[int, list[str]] = {}
    for directory in directories:
        devices.setdefault(os.stat(directory).st_dev, []).append(str(directory))
    for together in devices.values():
        if len(together) > 1:
            _logger.warning(
                "%s are on one file system and share its space; several directories of one drive "
                "gain nothing. Name one directory for each drive (--optimizer-state-dir)",
                " and ".join(together),
            )


def measure(directories: Sequence[Path]) -> list[float]:
    """Bytes per second that each directory reads and writes while all of them are busy.

    Takes at most about a second, and 128 MiB in each; no file outlives the call or the process.

    Raises
    ------
    CapacityError, TransferError
        The system's error.
    """
    with contextlib.ExitStack() as resources:
        scratches = [_Scratch(directory, resources) for directory in directories]
        threads = IoThreads(_THREADS_PER_DIRECTORY * len(directories), "tierstore-measure")
        resources.callback(threads.close)
        # The first write of an extent is slow, and no step does that: it is not measured.
        threads.run_all(_Scratch.fill, scratches)
        threads.run_all(_Scratch.work, scratches * _THREADS_PER_DIRECTORY)
        return [sum(scratch.rates) for scratch in scratches]


class _Scratch:
    """A nameless file in a directory, filled and then overwritten and read by several threads."""

    def __init__(self, directory: Path, resources: contextlib.ExitStack) -> None:
        self._path = directory / f".bandwidth-{secrets.token_hex(4)}"
        direct = not _direct_io.direct_io_refused(directory)
        _direct_io.allocate_file(self._path, _SCRATCH_NBYTES)
        try:
            self._descriptor = resources.enter_context(
                _direct_io.open_file(self._path, write=True, direct=direct)
            )
        finally:
            self._path.unlink()
        # Page-aligned, as direct I/O wants it; random, since some drives compress.
        self._data = mmap.mmap(-1, _BLOCK_NBYTES)
        self._data.write(os.urandom(_BLOCK_NBYTES))
        self._last = 0
        self._offsets = iter(range(0))
        self.rates: list[float] = []

    def fill(self) -> None:
        """Write all of the file, or as much as the time allows."""
        started = time.perf_counter()
        for offset in range(0, _SCRATCH_NBYTES, _BLOCK_NBYTES):
            self._write(offset)
            self._last = offset
            if time.perf_counter() - started > _LIMIT_S:
                break
        _direct_io.sync_descriptor(self._descriptor, self._path)
        self._offsets = iter(range(0, self._last + 1, _BLOCK_NBYTES))

    def work(self) -> None:
        """Overwrite blocks that no other thread does, read as many, and note the rate."""
        data = memoryview(mmap.mmap(-1, _BLOCK_NBYTES))
        nbytes = 0
        started = time.perf_counter()
        for offset in self._offsets:
            self._write(offset)
            _direct_io.read_full(self._descriptor, data, self._last - offset, self._path)
            nbytes += 2 * _BLOCK_NBYTES
            if time.perf_counter() - started > _LIMIT_S:
                break
        # Where the page cache took it, what counts is how fast the drive did.
        _direct_io.sync_descriptor(self._descriptor, self._path)
        self.rates.append(nbytes / (time.perf_counter() - started))

    def _write(self, offset: int) -> None:
        _direct_io.write_full(self._descriptor, memoryview(self._data), offset, self._path)
