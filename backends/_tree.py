"""A rank's directory: groups, records and chunk files of the file tiers and of snapshots.

::

    <root>/zarr.json                      group: format version, role, nonce
    <root>/rank-00003/zarr.json           group: identity and layouts, written once; the process
                                          that owns the directory holds a lock on this file
    <root>/rank-00003/COMMIT/zarr.json    group: the authority, which generation, which step
    <root>/rank-00003/current -> gen-a    for people
    <root>/rank-00003/gen-a/zarr.json     group: writing | complete, step, counters
    <root>/rank-00003/gen-a/opt-0/main/   arrays
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.backends import _direct_io
from tierstore.errors import CapacityError, CorruptError, StateError, TierStoreError
from tierstore.layout import StateLayout
from tierstore.metrics import readable
from tierstore.records import ArrayKey, Commit, Identity, OptimizerLayout
from tierstore.zarr_format import FORMAT_VERSION, ArrayFormat, group_metadata

__all__ = ["GENERATIONS", "ChunkFile", "Lease", "RankTree"]

GENERATIONS = ("gen-a", "gen-b")
_METADATA = "zarr.json"


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """One chunk of one array in one generation."""

    path: Path
    format: ArrayFormat
    n_tiles: int

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return self.format.file_nbytes(self.n_tiles)


class RankTree:
    """Paths, metadata and records of one rank's directory.

    Parameters
    ----------
    path
        The rank's directory; its parent is the zarr root.
    optimizers
        The arrays, by optimizer name.
    """

    def __init__(self, path: Path, optimizers: Mapping[str, OptimizerLayout]) -> None:
        self.path = path
        self.optimizers = optimizers
        self.formats = {
            key: entry.formats[key.name] for entry in optimizers.values() for key in entry.keys()
        }

    @property
    def _commit_path(self) -> Path:
        # A group like the others, so that any zarr reader sees it, and none meets a file in the
        # tree that it does not know.
        return self.path / "COMMIT" / _METADATA

    def chunk(self, generation: str, key: ArrayKey, chunk: int) -> ChunkFile:
        """One chunk file."""
        layout = self.optimizers[key.optimizer].layout
        form = self.formats[key]
        path = self.path / generation / key.optimizer / key.name / form.chunk_key(chunk)
        return ChunkFile(path, form, layout.tiles_in_chunk(chunk))

    def chunks(self, generation: str) -> Iterator[ChunkFile]:
        """All chunk files of a generation."""
        for key in self.formats:
            for chunk in range(self.optimizers[key.optimizer].layout.n_chunks):
                yield self.chunk(generation, key, chunk)

    def locate(self, generation: str, key: ArrayKey, tile: int) -> tuple[ChunkFile, int]:
        """The file that holds a tile, and the byte where the tile starts."""
        grid = self.optimizers[key.optimizer].layout.tile(tile)
        return self.chunk(generation, key, grid.chunk), self.formats[key].tile_offset(grid.place)

    @property
    def generation_nbytes(self) -> int:
        """Bytes of all chunk files of one generation."""
        return sum(
            entry.layout.n_chunks * self.formats[key].header_nbytes
            + entry.layout.n_tiles * self.formats[key].stride_nbytes
            for entry in self.optimizers.values()
            for key in entry.keys()
        )

    def require_space(self, generations: int = 1) -> None:
        """Refuse before anything is made what can't fit.

        Raises
        ------
        CapacityError
            With the bytes needed and the bytes free.
        """
        directory = self.path
        while not directory.is_dir():
            directory = directory.parent
        free = os.statvfs(directory)
        free_nbytes = free.f_bavail * free.f_frsize
        nbytes = generations * self.generation_nbytes
        if nbytes > free_nbytes:
            raise CapacityError(
                errno.ENOSPC,
                f"{self.path} needs {nbytes:,} bytes ({readable(nbytes)}) for {generations} "
                f"generation(s) of optimizer state, and {free_nbytes:,} ({readable(free_nbytes)}) "
                f"are free there{self._say_earlier_runs()}. Free space or choose another "
                "--optimizer-state-dir; --optimizer-state-recovery=none needs one generation only",
            )

    def earlier_runs(self) -> list[str]:
        """Names of the stores of other runs in the same directory."""
        root = self.path.parent
        found = {path.parent.parent for path in root.parent.glob("*/rank-*/zarr.json")}
        return sorted(path.name for path in found if path != root)

    def _say_earlier_runs(self) -> str:
        runs = self.earlier_runs()
        return (
            f", beside the stores of {len(runs)} other runs ({', '.join(runs[:5])})" if runs else ""
        )

    def remove(self) -> None:
        """Remove the rank's directory, and the root if no other rank is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        root = self.path.parent
        with contextlib.suppress(OSError):
            if os.listdir(root) == [_METADATA]:
                (root / _METADATA).unlink()
                root.rmdir()

    def create(self, identity: Identity, role: str) -> None:
        """Make the rank's directory with its metadata; it must not exist.

        Raises
        ------
        StateError
            The directory exists: somebody else's state is never touched.
        TransferError, CapacityError
            The system's error.
        """
        root = self.path.parent
        if self.path.exists():
            raise StateError(
                f"{self.path} exists already; state in it is never overwritten. Choose another "
                "directory, or move that one away"
            )
        _direct_io.make_directories(root)
        about = {"format": FORMAT_VERSION, "role": role, "nonce": identity.nonce}
        metadata = group_metadata(about)
        if (root / _METADATA).exists():
            if _direct_io.read_json(root / _METADATA) != metadata:
                raise StateError(
                    f"{root} exists already and is something else's: its {_METADATA} is not of "
                    "this run. Choose another directory"
                )
        else:
            # Every rank writes the same bytes in one step: whoever comes last changes nothing.
            _direct_io.write_json(root / _METADATA, metadata)
        _direct_io.make_directory(self.path)
        about = {
            "format": FORMAT_VERSION,
            "nonce": identity.nonce,
            "rank": identity.rank,
            "topology": dict(identity.topology),
            "optimizers": [
                {
                    "name": entry.name,
                    "arrays": dict(entry.arrays),
                    "layout": entry.layout.to_json(),
                }
                for entry in self.optimizers.values()
            ],
        }
        try:
            _direct_io.write_json(self.path / _METADATA, group_metadata(about))
            _direct_io.make_directory(self._commit_path.parent)
            _direct_io.write_json(self._commit_path, group_metadata({}))
            _direct_io.sync_directory(self.path)
            _direct_io.sync_directory(root)
        except BaseException:
            self.remove()
            raise

    @contextlib.contextmanager
    def of_one_generation(self, identity: Identity, role: str, commit: Commit) -> Iterator[str]:
        """Make a tree with one generation, let the block fill its chunk files, and finish it.

        Raises
        ------
        CapacityError, StateError, TransferError
            As `require_space`, `create` and the block; nothing is left behind.
        """
        self.require_space()
        self.create(identity, role)
        try:
            self.create_generation(GENERATIONS[0])
            yield GENERATIONS[0]
            self.finish(GENERATIONS[0], commit, identity.nonce)
        except BaseException:
            self.remove()
            raise

    def create_generation(self, generation: str) -> None:
        """Make a generation's groups and arrays, and reserve every byte of its chunk files.

        Raises
        ------
        CapacityError
            There is no room.
        """
        base = self.path / generation
        _direct_io.make_directory(base)
        self.write_record(generation, {"state": "writing"})
        for entry in self.optimizers.values():
            _direct_io.make_directory(base / entry.name)
            _direct_io.write_json(base / entry.name / _METADATA, group_metadata({}))
            for key in entry.keys():
                array = base / entry.name / key.name
                _direct_io.make_directory(array)
                _direct_io.make_directory(array / "c")
                _direct_io.write_json(array / _METADATA, self.formats[key].metadata())
        for chunk in self.chunks(generation):
            _direct_io.allocate_file(chunk.path, chunk.nbytes)
            with _direct_io.open_file(chunk.path, write=True) as descriptor:
                header = memoryview(chunk.format.header(chunk.n_tiles))
                _direct_io.write_full(descriptor, header, 0, chunk.path)
            _direct_io.sync_data(chunk.path)
        for directory in (
            *(base / key.optimizer / key.name / "c" for key in self.formats),
            *(base / key.optimizer / key.name for key in self.formats),
            *(base / name for name in self.optimizers),
            base,
            self.path,
        ):
            _direct_io.sync_directory(directory)

    def remove_leftovers(self) -> None:
        """Remove what a killed process left of replacing metadata; call it as the owner."""
        for pattern in (f".{_METADATA}.*", f"*/.{_METADATA}.*"):
            for path in self.path.glob(pattern):
                path.unlink()

    def write_record(self, generation: str, record: Mapping[str, Any]) -> None:
        """Replace a generation's record, durably."""
        _direct_io.write_json(self.path / generation / _METADATA, group_metadata(record))

    def finish(self, generation: str, commit: Commit, nonce: str) -> None:
        """Mark a generation complete, then make it the current one.

        The order is the crash safety: data on the drive (the caller's part), then the record that
        says the data is whole, then the name of the generation that counts.
        """
        self.write_record(
            generation,
            {
                "state": "complete",
                "step": commit.step,
                "nonce": nonce,
                "counters": dict(commit.state),
            },
        )
        about = {
            "format": FORMAT_VERSION,
            "generation": generation,
            "step": commit.step,
            "nonce": nonce,
        }
        _direct_io.write_json(self._commit_path, group_metadata(about))

    def current(self) -> tuple[str, Commit, str]:
        """The generation that counts, what it holds, and the nonce of the run that wrote it.

        Raises
        ------
        CorruptError
            No commit, records that disagree, or chunk files that are missing or too short.
        """
        about = _attributes(self._commit_path)
        try:
            generation, step, nonce = about["generation"], int(about["step"]), str(about["nonce"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"{self._commit_path} is not a commit record") from error
        if generation not in GENERATIONS:
            raise CorruptError(f"{self._commit_path} names generation {generation!r}")
        record = _attributes(self.path / generation / _METADATA)
        if (record.get("state"), record.get("step")) != ("complete", step):
            raise CorruptError(
                f"{self.path / generation} is not the whole step {step} that COMMIT names: its "
                f"record says {record.get('state')!r}, step {record.get('step')!r}. A run without "
                "recovery was stopped in mid-step; load a checkpoint"
            )
        wrong = [
            str(chunk.path)
            for chunk in self.chunks(generation)
            if not chunk.path.is_file() or chunk.path.stat().st_size != chunk.nbytes
        ]
        if wrong:
            raise CorruptError(
                f"{len(wrong)} chunk files of step {step} are missing or have the wrong length: "
                + ", ".join(wrong[:5])
            )
        return generation, Commit(step=step, state=record.get("counters", {})), nonce

    @classmethod
    def load(cls, path: Path) -> tuple[RankTree, Identity]:
        """Read the metadata of a rank's directory.

        Raises
        ------
        CorruptError, LayoutError
            It is not one, or damaged.
        """
        about = _attributes(path / _METADATA)
        try:
            if about["format"] != FORMAT_VERSION:
                raise CorruptError(
                    f"{path} has format {about['format']}; this release reads {FORMAT_VERSION}"
                )
            optimizers = {
                str(entry["name"]): OptimizerLayout(
                    name=str(entry["name"]),
                    layout=StateLayout.from_json(entry["layout"]),
                    arrays=dict(entry["arrays"]),
                )
                for entry in about["optimizers"]
            }
            identity = Identity(
                nonce=str(about["nonce"]), rank=int(about["rank"]), topology=about["topology"]
            )
            return cls(path, optimizers), identity
        except TierStoreError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"{path / _METADATA} is not a rank's metadata: {error!r}") from error


class Lease:
    """Exclusive ownership of a rank's directory while this process lives.

    The lock goes with the process, however it ends; a forked child gives up its copy at once, so
    that it can't keep the directory locked after its parent.

    Parameters
    ----------
    directory
        The rank's directory.

    Raises
    ------
    StateError
        Another process owns it.
    """

    def __init__(self, directory: Path) -> None:
        # The file is there as long as the directory is, and is never replaced.
        path = directory / _METADATA
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise StateError(
                f"{directory} is in use by another process; two jobs can't share one store. "
                "Choose another --optimizer-state-dir or role"
            ) from error
        _leases.add(self)

    def close(self) -> None:
        """Give the directory free, also where a forked child still holds the file open."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.abandon()

    def abandon(self) -> None:
        """Let go of this process's hold on the file without ending the owner's."""
        os.close(self._descriptor)
        self._descriptor = -1


_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


def _abandon_leases() -> None:
    for lease in _leases:
        if lease._descriptor >= 0:
            lease.abandon()


os.register_at_fork(after_in_child=_abandon_leases)


def _attributes(path: Path) -> dict[str, Any]:
    try:
        found = _direct_io.read_json(path)["attributes"]["tierstore"]
    except (KeyError, TypeError) as error:
        raise CorruptError(f"{path} has no tierstore attributes") from error
    if not isinstance(found, dict):
        raise CorruptError(f"{path} has no tierstore attributes")
    return found
