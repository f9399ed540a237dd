"""Optimizer state at rest, read-only: ranks, layouts, counters, and elements of arrays.

A store is what a file tier or a snapshot wrote, with all its ranks, in a directory or behind any
URL that fsspec opens. Nothing may be writing to it meanwhile: hold a store of a running job by a
snapshot, or a frozen generation.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore._saved_files import LocalFiles, SavedFiles, attributes_of, open_files, read_json
from tierstore.copies import SourceId
from tierstore.errors import ConfigError, CorruptError, LayoutError, TierStoreError
from tierstore.layout import StateLayout
from tierstore.records import ArrayKey, Commit, Identity, OptimizerLayout
from tierstore.zarr_format import CHECKSUM_NBYTES, FORMAT_VERSION, ArrayFormat, checksum

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DEFAULT_CACHE_TILES", "SavedArray", "SavedRank", "SavedStore"]

# Three arrays that come from eight ranks each.
DEFAULT_CACHE_TILES = 24
_METADATA = "zarr.json"
_GENERATIONS = ("gen-a", "gen-b")
_RANK = re.compile(r"rank-\d{5,}")
_FROZEN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_THREADS = 16


@dataclass(frozen=True, kw_only=True)
class SavedRank:
    """What one rank saved.

    Parameters
    ----------
    identity
        Rank, topology and run.
    optimizers
        The arrays, by optimizer name.
    group
        The group of the arrays below the rank's: ``gen-a``, or ``frozen/<name>``.
    commit
        Step and counters.
    places
        Optimizer name to the number of the directory that has each chunk.
    """

    identity: Identity
    optimizers: Mapping[str, OptimizerLayout]
    group: str
    commit: Commit
    places: Mapping[str, Sequence[int]]


def _numbers(start: int, numel: int, size: int) -> range:
    """Which blocks of `size` elements hold some elements."""
    return range(start // size, -(-(start + numel) // size) if numel else start // size)


class SavedStore:
    """A store at rest. Use it from one thread.

    Parameters
    ----------
    location
        The root with the ranks' groups: a path, or a URL for fsspec.
    directories
        For plain files that were spread over several drives: what the run that wrote them was
        given as its second and further directories, in that order. Links to them are not followed.
    frozen
        Name of a group below each rank's ``frozen`` to read, in place of the last step.
    cache_tiles
        Tiles kept in memory, of all arrays together; no more are ever held at once.
    check_files
        Whether all chunk files of all ranks are looked for now, and not only when they are read.
    storage_options
        For fsspec.

    Attributes
    ----------
    ranks
        What each rank saved.
    step
        The step that all of them have committed.

    Raises
    ------
    ConfigError, BackendUnavailableError
        The location can't be opened so; or chunks lie in directories that were not named.
    CorruptError, LayoutError
        It is no store, a rank or a file is missing, ranks hold different steps, or metadata that
        can't be right.
    TransferError
        The file system's error.
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        *,
        directories: Sequence[str | os.PathLike[str]] = (),
        frozen: str | None = None,
        cache_tiles: int = DEFAULT_CACHE_TILES,
        check_files: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if cache_tiles < 1:
            raise ConfigError(f"cache_tiles is {cache_tiles}; one tile is the least")
        if frozen is not None and not _FROZEN.fullmatch(frozen):
            raise ConfigError(f"{frozen!r} can't be the name of a frozen generation")
        self._files = open_files(location, dict(storage_options or {}))
        self._others = self._open_others(directories)
        self._cache_tiles = cache_tiles
        self._cache: OrderedDict[tuple[int, ArrayKey, int], NDArray[Any]] = OrderedDict()
        about = attributes_of(self._files, _METADATA)
        if "part_of" in about:
            raise ConfigError(f"{self} has a part of the chunks of {about['part_of']}: open that")
        names = sorted(name for name in self._files.names("") if _RANK.fullmatch(name))
        with ThreadPoolExecutor(_THREADS) as pool:
            found = list(pool.map(lambda name: self._load(name, frozen), names))
        self.ranks = {rank.identity.rank: rank for rank in found}
        self.step = self._common_step()
        if check_files:
            for source, entry in self.optimizers().items():
                for name in entry.arrays:
                    self.array(source.rank, source.optimizer, name).check()

    def __str__(self) -> str:
        return str(self._files)

    def _open_others(self, directories: Sequence[str | os.PathLike[str]]) -> list[SavedFiles]:
        if not directories:
            return []
        if not isinstance(self._files, LocalFiles):
            raise ConfigError(f"{self} is not in plain files: it can't have further directories")
        name = self._files.root.name
        return [LocalFiles(Path(directory).absolute() / name) for directory in directories]

    def _load(self, name: str, frozen: str | None) -> SavedRank:
        about = attributes_of(self._files, f"{name}/{_METADATA}")
        try:
            if about["format"] != FORMAT_VERSION:
                raise CorruptError(
                    f"{self}/{name} has format {about['format']}; this release reads "
                    f"{FORMAT_VERSION}"
                )
            optimizers, places = {}, {}
            for entry in about["optimizers"]:
                found = OptimizerLayout(
                    name=entry["name"],
                    layout=StateLayout.from_json(entry["layout"]),
                    arrays=dict(entry["arrays"]),
                )
                optimizers[found.name] = found
                found.formats.keys()  # raises where a type is unknown
                places[found.name] = self._places(entry["places"], found)
            identity = Identity(
                nonce=str(about["nonce"]),
                rank=_whole(about["rank"]),
                topology={key: _whole(value) for key, value in about["topology"].items()},
            )
            if identity.directory_name != name:
                raise CorruptError(f"{self}/{name} says that it is rank {identity.rank}")
            group, commit = self._committed(name, frozen, identity.nonce)
        except TierStoreError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"{self}/{name} is not a rank's group: {error!r}") from error
        return SavedRank(
            identity=identity, optimizers=optimizers, group=group, commit=commit, places=places
        )

    def _places(self, numbers: Any, entry: OptimizerLayout) -> list[int]:
        """The number of a directory for each chunk, as the rank's group gives it."""
        if not isinstance(numbers, list) or len(numbers) != entry.layout.n_chunks:
            raise ValueError(f"{entry.name} has {entry.layout.n_chunks} chunks in other places")
        highest = max(map(_whole, numbers), default=0)
        if self._others and highest > len(self._others):
            raise ConfigError(
                f"{self} has chunks in {highest + 1} directories, and {len(self._others)} further "
                "ones were named; name all of them, in the order of --optimizer-state-dir"
            )
        return numbers

    def _committed(self, name: str, frozen: str | None, nonce: str) -> tuple[str, Commit]:
        """The group that counts, and its record."""
        group: Any = f"frozen/{frozen}"
        about = None
        if frozen is None:
            about = attributes_of(self._files, f"{name}/COMMIT/{_METADATA}")
            group = about.get("generation")
            if group not in _GENERATIONS:
                raise CorruptError(f"{self}/{name} has committed nothing: COMMIT names {group!r}")
        record = attributes_of(self._files, f"{name}/{group}/{_METADATA}")
        named = record.get("step") if about is None else about.get("step")
        if record.get("state") != "complete" or named != record["step"]:
            raise CorruptError(
                f"{self}/{name}/{group} is not a whole step: its record says "
                f"{record.get('state')!r}, step {record.get('step')!r}, and COMMIT names step "
                f"{named!r}. A run was stopped in mid-step, or is running"
            )
        if record.get("nonce", nonce) != nonce:
            raise CorruptError(f"{self}/{name}/{group} was written by run {record['nonce']!r}")
        state, job = dict(record["counters"]), dict(record.get("job", {}))
        return group, Commit(step=_whole(record["step"]), state=state, job=job)

    def _common_step(self) -> int:
        """The step of all ranks; raises `CorruptError` if they are not all of one run and step."""
        identities = [rank.identity for rank in self.ranks.values()]
        if not identities:
            raise CorruptError(f"{self} has no rank in it")
        sizes = {identity.topology.get("world_size") for identity in identities}
        nonces = {identity.nonce for identity in identities}
        if len(sizes) > 1 or len(nonces) > 1:
            raise CorruptError(
                f"{self} has ranks of different runs: nonces {sorted(nonces)}, world sizes {sizes}"
            )
        world_size = sizes.pop() or 1 + max(self.ranks)
        if len(self.ranks) != world_size or max(self.ranks) >= world_size:
            lacking = (str(rank) for rank in range(world_size) if rank not in self.ranks)
            raise CorruptError(
                f"{self} has {len(self.ranks)} ranks of a job of {world_size}; missing: "
                f"{', '.join(islice(lacking, 5)) or 'none'}, highest: {max(self.ranks)}. Put the "
                "groups of all ranks into one root"
            )
        by_step: dict[int, list[int]] = {}
        for rank, saved in self.ranks.items():
            by_step.setdefault(saved.commit.step, []).append(rank)
        if len(by_step) > 1:
            said = (f"step {step} on {ranks[:5]}" for step, ranks in sorted(by_step.items()))
            raise CorruptError(
                f"the ranks of {self} have committed different steps: {', '.join(said)}, .... They "
                "do not go together; take a snapshot, or let the job resume and go on by a step"
            )
        return next(iter(by_step))

    def optimizers(self) -> dict[SourceId, OptimizerLayout]:
        """The arrays of every optimizer of every rank."""
        return {
            SourceId(rank, name): entry
            for rank, saved in sorted(self.ranks.items())
            for name, entry in saved.optimizers.items()
        }

    def array(self, rank: int, optimizer: str, name: str) -> SavedArray:
        """One array.

        Raises
        ------
        LayoutError
            There is no such array.
        """
        try:
            form = self.ranks[rank].optimizers[optimizer].formats[name]
        except KeyError:
            raise LayoutError(f"{self} has no array {optimizer}/{name} of rank {rank}") from None
        return SavedArray(self, self.ranks[rank], ArrayKey(optimizer, name), form)

    # For SavedArray.

    def _directory(self, place: int) -> SavedFiles:
        # Without further directories the file itself may be here, in a copy of the store.
        return self._others[place - 1] if place and self._others else self._files

    def _cached(self, array: SavedArray, tile: int) -> NDArray[Any]:
        place = (array.rank, array.key, tile)
        found = self._cache.pop(place, None)
        if found is None:
            while len(self._cache) >= self._cache_tiles:
                self._cache.popitem(last=False)
            found = array._load(tile)
        self._cache[place] = found
        return found


class SavedArray:
    """One array of a `SavedStore`; get it by `SavedStore.array`.

    Attributes
    ----------
    rank, key, dtype
        Whose it is, its name, and its type by torch's name. numpy has no bfloat16 and fp8, so of
        these the bits are given, as uint16 and uint8.
    layout
        Its grid and shards.
    """

    def __init__(
        self, store: SavedStore, saved: SavedRank, key: ArrayKey, form: ArrayFormat
    ) -> None:
        self.rank = saved.identity.rank
        self.key = key
        self.dtype = form.dtype
        self.layout = saved.optimizers[key.optimizer].layout
        self._store = store
        self._format = form
        self._path = f"{saved.identity.directory_name}/{saved.group}/{key}"
        self._places = saved.places[key.optimizer]
        self._known: set[int] = set()

    def __str__(self) -> str:
        return f"{self._store}/{self._path}"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Type of the elements that `read` and `tile` give."""
        return np.dtype(self._format.type.zarr).newbyteorder("<")

    def check(self) -> None:
        """Look for metadata and for all chunk files in their full length.

        Raises
        ------
        CorruptError
            Something is missing, or not as the rank's group says.
        """
        found = read_json(self._store._files, f"{self._path}/{_METADATA}")
        wanted = self._format.metadata()
        wrong = [
            name
            for name, value in wanted.items()
            if name != "attributes" and (not isinstance(found, dict) or found.get(name) != value)
        ]
        if wrong:
            raise CorruptError(f"{self}: {', '.join(wrong)} are not as the rank's group says")
        for chunk in range(self.layout.n_chunks):
            self._chunk(chunk)

    def tile(self, index: int) -> NDArray[Any]:
        """One tile, checked against its crc32c; read-only, and kept for the next call.

        Raises
        ------
        CorruptError, TransferError, ConfigError
            As `read`.
        """
        return self._store._cached(self, index)

    def read(self, start: int, numel: int) -> NDArray[Any]:
        """Some elements; only the tiles that hold them are read.

        Raises
        ------
        LayoutError
            The array has no such elements.
        CorruptError
            A file is missing or too short, or a tile does not match its checksum.
        TransferError
            The file system's error.
        ConfigError
            A file lies in a directory that was not named.
        """
        if start < 0 or numel < 0 or start + numel > self.layout.numel:
            raise LayoutError(
                f"elements {start} to {start + numel} of {self}, which has {self.layout.numel}"
            )
        grid = self.layout.tile_numel
        # Before there is memory for them: metadata may promise any number of elements.
        for chunk in _numbers(start, numel, self.layout.chunk_numel):
            self._chunk(chunk)
        out = np.empty(numel, self.numpy_dtype)
        for index in _numbers(start, numel, grid):
            low, high = max(start, index * grid), min(start + numel, (index + 1) * grid)
            found = self.tile(index)[low - index * grid : high - index * grid]
            out[low - start : high - start] = found
        return out

    def _chunk(self, chunk: int) -> tuple[SavedFiles, str]:
        """A chunk file that is there in full length."""
        path = f"{self._path}/{self._format.chunk_key(chunk)}"
        files = self._store._directory(self._places[chunk])
        if chunk not in self._known:
            wanted = self._format.file_nbytes(self.layout.tiles_in_chunk(chunk))
            found = files.nbytes(path)
            if found != wanted:
                raise CorruptError(f"{files}/{path} has {found:,} bytes and not {wanted:,}")
            self._known.add(chunk)
        return files, path

    def _load(self, index: int) -> NDArray[Any]:
        tile = self.layout.tile(index)
        files, path = self._chunk(tile.chunk)
        nbytes, offset = self._format.tile_nbytes, self._format.tile_offset(tile.place)
        data = memoryview(files.read(path, offset, nbytes + CHECKSUM_NBYTES))
        if checksum(data[:nbytes]) != data[nbytes:]:
            raise CorruptError(
                f"tile {index} of {self.key} (byte {offset} of {files}/{path}) does not match its "
                "checksum: it was changed after it was written. Load another step"
            )
        return np.frombuffer(data, self.numpy_dtype, count=tile.numel)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value
