"""A rank's directory: groups, records and chunk files of the file tiers and of snapshots.

::

    <root>/zarr.json                      group: format version, role, nonce
    <root>/rank-00003/zarr.json           group: identity and layouts, written once; the process
                                          that owns the directory holds a lock on this file
    <root>/rank-00003/COMMIT/zarr.json    group: the authority, which generation, which step
    <root>/rank-00003/current -> gen-a    for people
    <root>/rank-00003/gen-a/zarr.json     group: writing | complete, step, counters
    <root>/rank-00003/gen-a/opt-0/main/   arrays
    <root>/rank-00003/frozen/, spare/     see `tierstore.backends._frozen`

With several directories, each further one holds chunk files at the same places below a root of the
same name. The first one has links to them, for zarr; what is here goes by the places and never by
a link, which somebody else may have set.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tierstore.backends import _direct_io
from tierstore.backends._chunk_file import ChunkFile
from tierstore.backends._lease import Lease
from tierstore.backends._placement import require_space
from tierstore.errors import ConfigError, CorruptError, StateError, TierStoreError
from tierstore.layout import StateLayout
from tierstore.records import ArrayKey, Commit, Identity, OptimizerLayout
from tierstore.zarr_format import FORMAT_VERSION, group_metadata

__all__ = ["GENERATIONS", "METADATA", "RankTree", "remove_empty"]

GENERATIONS = ("gen-a", "gen-b")
METADATA = "zarr.json"


class RankTree:
    """Paths, metadata and records of one rank's directory.

    Parameters
    ----------
    path
        The rank's directory; its parent is the zarr root.
    optimizers
        The arrays, by optimizer name.
    others
        The rank's directories on further drives.
    places
        Optimizer name to the number of a directory for each chunk (0 is `path`, 1 the first of
        `others`); None has all chunks in `path`.
    """

    def __init__(
        self,
        path: Path,
        optimizers: Mapping[str, OptimizerLayout],
        others: Sequence[Path] = (),
        places: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.path = path
        self.paths = (path, *others)
        self.optimizers = optimizers
        self.places = places or {
            name: [0] * entry.layout.n_chunks for name, entry in optimizers.items()
        }
        self.formats = {
            key: entry.formats[key.name] for entry in optimizers.values() for key in entry.keys()
        }

    @property
    def _commit_path(self) -> Path:
        # A group like the others, so that any zarr reader sees it, and none meets a file in the
        # tree that it does not know.
        return self.path / "COMMIT" / METADATA

    def chunk(self, generation: str, key: ArrayKey, chunk: int) -> ChunkFile:
        """One chunk file."""
        layout = self.optimizers[key.optimizer].layout
        form = self.formats[key]
        place = self.places[key.optimizer][chunk]
        path = self.paths[place] / generation / str(key) / form.chunk_key(chunk)
        return ChunkFile(path, form, layout.tiles_in_chunk(chunk), place)

    def chunks(self, generation: str) -> Iterator[ChunkFile]:
        """All chunk files of a generation."""
        for key in self.formats:
            for chunk in range(self.optimizers[key.optimizer].layout.n_chunks):
                yield self.chunk(generation, key, chunk)

    def locate(self, generation: str, key: ArrayKey, tile: int) -> tuple[ChunkFile, int]:
        """The file that holds a tile, and the byte where the tile starts."""
        grid = self.optimizers[key.optimizer].layout.tile(tile)
        return self.chunk(generation, key, grid.chunk), self.formats[key].tile_offset(grid.place)

    def lease(self) -> Lease:
        """Own the directories; see `Lease`."""
        return Lease(self.path / METADATA)

    def remove(self) -> None:
        """Remove the rank's directories, and each root that no other rank is in."""
        # The first one last: as long as anything is left, it says where.
        for path in reversed(self.paths):
            shutil.rmtree(path, ignore_errors=True)
            remove_empty(path.parent)

    def create(self, identity: Identity, role: str) -> None:
        """Make the rank's directories with their metadata; none of them may exist.

        Raises
        ------
        StateError
            One of them exists: somebody else's state is never touched.
        TransferError, CapacityError
            The system's error.
        """
        about = {"format": FORMAT_VERSION, "role": role, "nonce": identity.nonce}
        with contextlib.ExitStack() as undo:
            for path in self.paths:
                if path.exists():
                    raise StateError(
                        f"{path} exists already; state in it is never overwritten. Choose another "
                        "directory, or move that one away"
                    )
                _direct_io.make_directories(path.parent)
                is_new = _is_new(path.parent, about)
                undo.callback(remove_empty, path.parent)
                if is_new:
                    # Every rank writes the same in one step: whoever comes last changes nothing.
                    part_of = {} if path == self.path else {"part_of": str(self.path.parent)}
                    _direct_io.write_json(
                        path.parent / METADATA, group_metadata({**about, **part_of})
                    )
                _direct_io.make_directory(path)
                undo.callback(shutil.rmtree, path, ignore_errors=True)
            self._describe(identity)
            for path in self.paths:
                _direct_io.sync_directory(path)
                _direct_io.sync_directory(path.parent)
            undo.pop_all()

    def _describe(self, identity: Identity) -> None:
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
                    "places": list(self.places[entry.name]),
                }
                for entry in self.optimizers.values()
            ],
        }
        _direct_io.write_json(self.path / METADATA, group_metadata(about))
        _direct_io.make_directory(self._commit_path.parent)
        _direct_io.write_json(self._commit_path, group_metadata({}))

    @contextlib.contextmanager
    def of_one_generation(self, identity: Identity, role: str, commit: Commit) -> Iterator[str]:
        """Make a tree with one generation, let the block fill its chunk files, and finish it.

        Raises
        ------
        CapacityError, StateError, TransferError
            As `require_space`, `create` and the block; nothing is left behind.
        """
        require_space(self.paths, self.optimizers, 1)
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
        with self.new_generation(generation):
            self.write_record(generation, {"state": "writing"})
            for chunk in self.chunks(generation):
                chunk.make(chunk.path)

    @contextlib.contextmanager
    def new_generation(self, generation: str) -> Iterator[None]:
        """Make groups and arrays, let the block fill in chunk files, and bring all names to disk.

        The record is not written.
        """
        groups = [Path(generation), *(Path(generation, name) for name in self.optimizers)]
        arrays = {Path(generation, str(key)): form for key, form in self.formats.items()}
        directories = [*groups, *arrays, *(array / "c" for array in arrays)]
        for path in self.paths:
            for directory in directories:
                _direct_io.make_directory(path / directory)
        for group in groups[1:]:
            _direct_io.write_json(self.path / group / METADATA, group_metadata({}))
        for array, form in arrays.items():
            _direct_io.write_json(self.path / array / METADATA, form.metadata())
        yield
        for chunk in self.chunks(generation):
            if chunk.place:
                link = self.path / chunk.path.relative_to(self.paths[chunk.place])
                _direct_io.replace_link(link, str(chunk.path))
        for path in self.paths:
            for directory in reversed(directories):
                _direct_io.sync_directory(path / directory)
            _direct_io.sync_directory((path / generation).parent)

    def remove_leftovers(self) -> None:
        """Remove what a killed process left of replacing metadata; call it as the owner."""
        for pattern in (f".{METADATA}.*", f"*/.{METADATA}.*"):
            for path in self.path.glob(pattern):
                path.unlink()

    def write_record(self, generation: str, record: Mapping[str, Any]) -> None:
        """Replace a generation's record, durably."""
        _direct_io.write_json(self.path / generation / METADATA, group_metadata(record))

    def write_complete(self, generation: str, commit: Commit, nonce: str) -> None:
        """Replace a generation's record by one that says what it holds, durably."""
        self.write_record(
            generation,
            {
                "state": "complete",
                "step": commit.step,
                "nonce": nonce,
                "counters": dict(commit.state),
                "job": dict(commit.job),
            },
        )

    def finish(self, generation: str, commit: Commit, nonce: str) -> None:
        """Mark a generation complete, then make it the current one.

        The order is the crash safety: data on the drive (the caller's part), then the record that
        says the data is whole, then the name of the generation that counts.
        """
        self.write_complete(generation, commit, nonce)
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
        commit = self.held(generation)
        if commit is None or commit.step != step:
            raise CorruptError(
                f"{self.path / generation} is not the whole step {step} that COMMIT names: it "
                f"holds {'no whole step' if commit is None else f'step {commit.step}'}. A run "
                "without recovery was stopped in mid-step; load a checkpoint"
            )
        return generation, commit, nonce

    def forget_after(self, current: str, step: int) -> None:
        """Mark what a generation other than the current one holds of a later step as not whole.

        A step that is taken back will be made again, perhaps with other data, and on other ranks
        it already may have been.
        """
        for generation in GENERATIONS:
            if generation == current or not (self.path / generation).is_dir():
                continue
            record = _attributes(self.path / generation / METADATA)
            if record.get("state") == "complete" and record.get("step") != step - 1:
                self.write_record(generation, {"state": "writing"})

    def held(self, generation: str) -> Commit | None:
        """What a generation holds, if it is there and whole.

        Raises
        ------
        CorruptError
            Its record says that it is whole, and chunk files are missing or too short.
        """
        if not (self.path / generation).is_dir():
            return None
        record = _attributes(self.path / generation / METADATA)
        if record.get("state") != "complete":
            return None
        try:
            step = int(record["step"])
            commit = Commit(step=step, state=dict(record["counters"]), job=dict(record["job"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"{self.path / generation} has no readable record") from error
        self._require_chunks(generation, step)
        return commit

    def _require_chunks(self, generation: str, step: int) -> None:
        wrong = [
            chunk
            for chunk in self.chunks(generation)
            if not chunk.path.is_file() or chunk.path.stat().st_size != chunk.nbytes
        ]
        if wrong:
            numbers = sorted({chunk.place + 1 for chunk in wrong})
            raise CorruptError(
                f"{len(wrong)} chunk files of step {step} are missing or have the wrong length: "
                + ", ".join(str(chunk.path) for chunk in wrong[:5])
                + (f". All lie in {_say(numbers)}" if len(self.paths) > 1 else "")
            )

    @classmethod
    def load(cls, path: Path, others: Sequence[Path] = ()) -> tuple[RankTree, Identity]:
        """Read the metadata of a rank's directory.

        Raises
        ------
        ConfigError
            It has chunks in more directories than `path` and `others`.
        CorruptError, LayoutError
            It is not one, or damaged.
        """
        about = _attributes(path / METADATA)
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
            places = {str(entry["name"]): entry["places"] for entry in about["optimizers"]}
        except TierStoreError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"{path / METADATA} is not a rank's metadata: {error!r}") from error
        for name, numbers in places.items():
            _check_places(path, numbers, optimizers[name].layout.n_chunks, 1 + len(others))
        return cls(path, optimizers, others, places), identity


def _check_places(path: Path, numbers: Any, n_chunks: int, n_directories: int) -> None:
    # Somebody else may have written them.
    if (
        not isinstance(numbers, list)
        or len(numbers) != n_chunks
        or any(type(number) is not int or number < 0 for number in numbers)
    ):
        raise CorruptError(
            f"{path / METADATA} does not give the number of a directory for each of {n_chunks} "
            "chunks"
        )
    missing = sorted({number + 1 for number in numbers if number >= n_directories})
    if missing:
        raise ConfigError(f"{path} has chunks in {_say(missing)}, and {n_directories} were named")


def _say(numbers: Sequence[int]) -> str:
    return (
        f"directory {', '.join(map(str, numbers[:5]))} of --optimizer-state-dir (it must name the "
        "directories of the run that made the store, in the same order)"
    )


def _is_new(root: Path, about: Mapping[str, Any]) -> bool:
    """Whether a root has no metadata yet; raises `StateError` if it has another run's."""
    if not (root / METADATA).exists():
        return True
    with contextlib.suppress(CorruptError):
        if about.items() <= _attributes(root / METADATA).items():
            return False
    raise StateError(
        f"{root} exists already and is something else's: its {METADATA} is not of this run. "
        "Choose another directory"
    )


def remove_empty(directory: Path) -> None:
    """Remove a directory that has nothing but metadata of its own, such as a root without ranks."""
    with contextlib.suppress(OSError):
        if set(os.listdir(directory)) <= {METADATA}:
            (directory / METADATA).unlink(missing_ok=True)
            directory.rmdir()


def _attributes(path: Path) -> dict[str, Any]:
    try:
        found = _direct_io.read_json(path)["attributes"]["tierstore"]
    except (KeyError, TypeError) as error:
        raise CorruptError(f"{path} has no tierstore attributes") from error
    if not isinstance(found, dict):
        raise CorruptError(f"{path} has no tierstore attributes")
    return found
