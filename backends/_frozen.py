"""Frozen generations: a finished step that hard links keep while training goes on.

::

    <root>/rank-00003/frozen/zarr.json             group
    <root>/rank-00003/frozen/<name>/zarr.json      group: complete, step, counters
    <root>/rank-00003/frozen/<name>/opt-0/main/    arrays, as in gen-a: metadata of their own, and
                                                   the chunk files of gen-a or gen-b by other names

A frozen generation counts from the moment on when its record is there, which is made last and
removed first: without one it is what a killed process left, and its owner removes it.

A chunk file with several names is never written. Before a generation is overwritten, each such
file of it is replaced by a spare, so that the frozen name alone has the old one. There is a spare
for each file of gen-a and gen-b that has another name, from the moment on when it was given: a
step needs no space that it does not have.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tierstore.answers import FrozenFile
from tierstore.backends import _direct_io
from tierstore.backends._chunk_file import ChunkFile
from tierstore.backends._spares import Kind, Spares
from tierstore.backends._tree import GENERATIONS, METADATA, RankTree, remove_empty
from tierstore.errors import CorruptError, StateError, TierStoreError
from tierstore.records import Commit
from tierstore.zarr_format import group_metadata

__all__ = ["Frozen"]

_logger = logging.getLogger("tierstore.files")

_DIRECTORY = "frozen"


class Frozen:
    """The frozen generations of a rank's directory, and the spares that let training go on.

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
        self._tree = tree
        self._spares = Spares(tree, run_all)
        # Freezing and releasing exclude each other. `replace` excludes neither: it belongs to a
        # step, which must not wait while large files are removed, and takes spares only for files
        # that both count as in need of one.
        self._lock = threading.Lock()

    def take_up(self, current: str) -> None:
        """Find what an earlier process froze, and remove what it did not finish; as the owner."""
        self._spares.find()
        names = {path.name for top in self._tree.paths for path in _directories(top / _DIRECTORY)}
        for name in sorted(names):
            if not (self._tree.path / _DIRECTORY / name / METADATA).exists():
                self._dissolve(_generation(name), current)
        self._spares.trim(self._wanted(current))
        # It may have been killed after it replaced a file and before that was on the drive.
        for generation in self._generations():
            self._sync(self._tree.chunks(generation))

    def commits(self) -> dict[str, Commit]:
        """What each frozen generation holds, by name, earlier steps first."""
        found = {}
        for path in _directories(self._tree.path / _DIRECTORY):
            if not (path / METADATA).exists():
                continue
            try:
                commit = self._tree.held(_generation(path.name))
            except CorruptError as error:
                _logger.warning("%s can't be used: %s; release it", path, error)
            else:
                if commit is not None:
                    found[path.name] = commit
        return dict(sorted(found.items(), key=lambda item: (item[1].step, item[0])))

    def files(self, name: str) -> list[FrozenFile]:
        """See `TierStore.frozen_files`."""
        top = self._require(name)
        generation = _generation(name)
        if self._tree.held(generation) is None:
            raise StateError(f"{top} is not whole; release it")
        paths = {path.relative_to(top): path for path in top.rglob(METADATA)}
        for chunk in self._tree.chunks(generation):
            # Where it is: the first directory has links to what lies on other drives.
            there = self._tree.paths[chunk.place] / generation
            paths[chunk.path.relative_to(there)] = chunk.path
        # The record last, so that a copy made in this order is whole when it has one.
        record = Path(METADATA)
        ordered = sorted(paths, key=lambda path: (path == record, path))
        return [FrozenFile(path, paths[path], paths[path].stat().st_size) for path in ordered]

    def _require(self, name: str) -> Path:
        path = self._tree.path / _DIRECTORY / name
        if not (path / METADATA).is_file():
            raise StateError(
                f"nothing is frozen as {name!r} in {self._tree.path}; there is: "
                f"{', '.join(self.commits()) or 'nothing'}"
            )
        return path

    def freeze(self, name: str, generation: str, commit: Commit, nonce: str) -> None:
        """Give a whole generation's chunk files a second name; all or nothing.

        Raises
        ------
        StateError
            The name is in use.
        CapacityError
            There is no room for the files that training then needs.
        TransferError
            The file system makes no hard links, or the system's error.
        """
        with self._lock:
            if (self._tree.path / _DIRECTORY / name / METADATA).exists():
                raise StateError(
                    f"{self._tree.path} has a frozen generation {name!r} already; release it or "
                    "choose another name"
                )
            before = self._spares.count()
            if any((path / _DIRECTORY / name).exists() for path in self._tree.paths):
                self._remove(name)  # what an earlier call that failed could not remove
            try:
                self._link(name, generation)
                self._spares.reserve(self._wanted(generation))
                # What it names is on the drive: the data since its commit, the rest since now.
                self._tree.write_complete(_generation(name), commit, nonce)
            except BaseException:
                self._remove(name)
                self._spares.trim(before)
                raise

    def _link(self, name: str, generation: str) -> None:
        for path in self._tree.paths:
            _direct_io.make_directory(path / _DIRECTORY, exist_ok=True)
            _direct_io.sync_directory(path)
        group = self._tree.path / _DIRECTORY / METADATA
        if not group.exists():
            _direct_io.write_json(group, group_metadata({}))
        frozen = _generation(name)
        with self._tree.new_generation(frozen):
            for chunk, link in zip(
                self._tree.chunks(generation), self._tree.chunks(frozen), strict=True
            ):
                _direct_io.link_file(chunk.path, link.path)

    def linked(self, generation: str) -> list[ChunkFile]:
        """Chunk files that have other names, ours or somebody else's, and must not be written."""
        return [
            chunk
            for chunk in self._tree.chunks(generation)
            if _direct_io.has_other_links(chunk.path)
        ]

    def replace(self, chunks: Sequence[ChunkFile]) -> None:
        """Let chunk files that have other names be spares, which may be written."""
        try:
            for chunk in chunks:
                self._spares.put_in_place(chunk)
        finally:
            self._sync(chunks)

    @staticmethod
    def _sync(chunks: Iterable[ChunkFile]) -> None:
        """Bring the names of chunk files to the drive.

        Before their generation can be committed: otherwise the record of a step could reach the
        drive, and the names of the files that hold it not.
        """
        for directory in {chunk.path.parent for chunk in chunks}:
            _direct_io.sync_directory(directory)

    def release(self, name: str, current: str | None) -> None:
        """Remove a frozen generation; files that only it has become spares if any are missing."""
        with self._lock:
            self._forget(self._require(name))
            self._dissolve(_generation(name), current)

    @staticmethod
    def _forget(top: Path) -> None:
        # On the drive before a file of it can be used for anything else.
        _direct_io.remove_file(top / METADATA)
        _direct_io.sync_directory(top)

    def _dissolve(self, frozen: str, current: str | None) -> None:
        """Remove the files of a frozen generation that has no record."""
        own = []
        for chunk in self._tree.chunks(frozen):
            if _direct_io.has_other_links(chunk.path):
                _direct_io.remove_file(chunk.path)
            elif chunk.path.is_file():
                own.append(chunk)
        # Now no file of gen-a and gen-b counts for its name here.
        wanted = self._wanted(current)
        for chunk in own:
            kind = Kind.of(chunk)
            if self._spares.count()[kind] < wanted[kind]:
                # On a full file system even a new name may find no room; removing needs none.
                with contextlib.suppress(TierStoreError):
                    self._spares.recycle(chunk)
        self._remove(Path(frozen).name)
        self._spares.trim(wanted)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(TierStoreError):
            self._forget(self._tree.path / _DIRECTORY / name)
        # The first directory last: it says where the rest is.
        for path in reversed(self._tree.paths):
            shutil.rmtree(path / _DIRECTORY / name, ignore_errors=True)
            remove_empty(path / _DIRECTORY)

    def _wanted(self, current: str | None) -> Counter[Kind]:
        """Spares that the coming steps may need if the current generation is, or were, frozen."""
        return Counter(
            Kind.of(chunk)
            for generation in self._generations()
            for chunk in self._tree.chunks(generation)
            if generation == current or _direct_io.has_other_links(chunk.path)
        )

    def _generations(self) -> list[str]:
        return [name for name in GENERATIONS if (self._tree.path / name).is_dir()]


def _generation(name: str) -> str:
    """A frozen generation's place below the rank's directory."""
    return f"{_DIRECTORY}/{name}"


def _directories(path: Path) -> list[Path]:
    return sorted(found for found in path.iterdir() if found.is_dir()) if path.is_dir() else []
