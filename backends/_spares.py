"""Chunk files that hold nothing yet, each ready to take the place of one that must stay as it is.

::

    <root>/rank-00003/spare/zarr.json   an empty array, inside of which zarr looks for nothing
    <root>/rank-00003/spare/<token>     files of a chunk's length, with its header

Each drive has its own, so that a spare gets to its place by a rename.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tierstore.backends import _direct_io, _placement
from tierstore.backends._chunk_file import ChunkFile
from tierstore.backends._tree import GENERATIONS, METADATA, RankTree, remove_empty
from tierstore.errors import CapacityError
from tierstore.metrics import readable
from tierstore.zarr_format import ArrayFormat

__all__ = ["Kind", "Spares"]

_DIRECTORY = "spare"
_HEADROOM_NBYTES = 4 * 2**20
"""Bytes that stay free on each file system: records of coming steps must find room as well."""


class Kind(NamedTuple):
    """What makes one spare as good as another: the drive, and all that the header depends on."""

    place: int
    tiles_per_chunk: int
    tile_nbytes: int
    stride_nbytes: int
    n_tiles: int

    @classmethod
    def of(cls, chunk: ChunkFile) -> Kind:
        """The kind of file that a chunk is."""
        form = chunk.format
        sizes = form.tiles_per_chunk, form.tile_nbytes, form.stride_nbytes, chunk.n_tiles
        return cls(chunk.place, *sizes)


class Spares:
    """The spare chunk files of a rank's directory.

    Parameters
    ----------
    tree
        The rank's directory.
    run_all
        Calls a function for each item in I/O threads; see `IoThreads.run_all`.
    """

    def __init__(
        self, tree: RankTree, run_all: Callable[[Callable[[Any], None], Iterable[Any]], None]
    ) -> None:
        self._tree, self._run_all = tree, run_all
        self._directories = [path / _DIRECTORY for path in tree.paths]
        # Any chunk of a kind tells its length and its header.
        self._samples = {Kind.of(chunk): chunk for chunk in tree.chunks(GENERATIONS[0])}
        # Used again from the left, made anew at the right. Overwriting what was written before is
        # faster than the first write to reserved extents, so the used ones go first and the new
        # ones are removed first. Taking and giving one is atomic: a release in another thread may
        # go on while a step begins.
        self._free: dict[Kind, deque[Path]] = {kind: deque() for kind in self._samples}

    def count(self) -> Counter[Kind]:
        """How many there are."""
        return Counter({kind: len(free) for kind, free in self._free.items()})

    def find(self) -> None:
        """Take up what an earlier process left, and remove what can't be used; as the owner."""
        for place, directory in enumerate(self._directories):
            if not directory.is_dir():
                continue
            for path in sorted(directory.iterdir()):
                if path.name == METADATA or not path.is_file():
                    continue
                kind = self._kind_found(place, path)
                if kind is None:
                    _direct_io.remove_file(path)
                else:
                    self._free[kind].append(path)

    def _kind_found(self, place: int, path: Path) -> Kind | None:
        # By the header and not by a name: a process may have been killed before it was written.
        for kind, sample in self._samples.items():
            if kind.place == place and _fits(path, sample):
                header = sample.format.header(sample.n_tiles)
                found = bytearray(len(header))
                with _direct_io.open_file(path) as descriptor:
                    _direct_io.read_full(descriptor, memoryview(found), 0, path)
                if found == header:
                    return kind
        return None

    def reserve(self, wanted: Mapping[Kind, int]) -> None:
        """Make what is missing of so many spares, with every byte reserved; all or nothing.

        Raises
        ------
        CapacityError, TransferError
            There is no room, or the system's error.
        """
        missing = Counter(wanted) - self.count()
        if not missing:
            return
        self._require_room(missing)
        new = [
            (kind, self._directories[kind.place] / secrets.token_hex(8))
            for kind in missing.elements()
        ]
        try:
            self._make_directories({kind.place for kind in missing})
            self._run_all(lambda item: self._samples[item[0]].make(item[1]), new)
            for place in {kind.place for kind in missing}:
                _direct_io.sync_directory(self._directories[place])
        except BaseException:
            for _, path in new:
                path.unlink(missing_ok=True)
            self._remove_empty()
            raise
        for kind, path in new:
            self._free[kind].append(path)

    def _require_room(self, missing: Mapping[Kind, int]) -> None:
        # Before anything is made: reserving until it fails would fill the drive for a moment, and
        # others may be writing there.
        needed: Counter[int] = Counter()
        where: dict[int, Path] = {}
        for kind, count in missing.items():
            path = self._tree.paths[kind.place]
            device = os.stat(path).st_dev
            where.setdefault(device, path)
            needed[device] += count * self._samples[kind].nbytes
        for device, nbytes in needed.items():
            free_nbytes = _placement.free_nbytes(where[device])
            if nbytes + _HEADROOM_NBYTES > free_nbytes:
                raise CapacityError(
                    errno.ENOSPC,
                    f"{where[device]} needs {nbytes:,} bytes ({readable(nbytes)}) for what the "
                    "coming steps write in place of frozen files, and "
                    f"{free_nbytes:,} ({readable(free_nbytes)}) are free. Release a frozen "
                    "generation, free space, or copy the state to another place (snapshot)",
                )

    def _make_directories(self, places: Iterable[int]) -> None:
        for place in places:
            if not self._directories[place].is_dir():
                _direct_io.make_directory(self._directories[place], exist_ok=True)
                _direct_io.sync_directory(self._tree.paths[place])
        first = self._directories[0]
        if first.is_dir() and not (first / METADATA).exists():
            empty = ArrayFormat(dtype="float32", numel=0, chunk_numel=1024, tile_numel=1024)
            _direct_io.write_json(first / METADATA, empty.metadata())

    def put_in_place(self, chunk: ChunkFile) -> None:
        """Let a spare have a chunk file's name; what had it keeps its other names.

        Raises
        ------
        CapacityError, TransferError
            There is none left (somebody else has made links, or removed spares) and no room.
        """
        path = self._take(chunk)
        try:
            _direct_io.move_file(path, chunk.path)
        except BaseException:
            self._free[Kind.of(chunk)].appendleft(path)
            raise

    def _take(self, chunk: ChunkFile) -> Path:
        free = self._free[Kind.of(chunk)]
        with contextlib.suppress(IndexError):
            while True:
                path = free.popleft()
                if _fits(path, chunk):
                    return path
                path.unlink(missing_ok=True)
        self._make_directories([chunk.place])
        path = self._directories[chunk.place] / secrets.token_hex(8)
        chunk.make(path)
        return path

    def recycle(self, chunk: ChunkFile) -> None:
        """Make a spare of a file that nobody needs under its name any more."""
        self._make_directories([chunk.place])
        path = self._directories[chunk.place] / secrets.token_hex(8)
        _direct_io.move_file(chunk.path, path)
        self._free[Kind.of(chunk)].appendleft(path)

    def trim(self, wanted: Mapping[Kind, int]) -> None:
        """Remove those beyond so many, which takes time for large files."""
        for kind, free in self._free.items():
            with contextlib.suppress(IndexError):
                while len(free) > wanted.get(kind, 0):
                    free.pop().unlink(missing_ok=True)
        self._remove_empty()

    def _remove_empty(self) -> None:
        for directory in self._directories:
            remove_empty(directory)


def _fits(path: Path, chunk: ChunkFile) -> bool:
    """Whether a file of the pool may be written: a file, of the right length, and nobody else's."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    wanted = chunk.nbytes, 1
    return stat.S_ISREG(found.st_mode) and (found.st_size, found.st_nlink) == wanted
