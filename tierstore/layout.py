"""Which element of which parameter lies where in a rank's state arrays. Pure: no I/O, no torch.

An *array* is the image of what one rank owns of one optimizer: its shards of the communication
buffers, in buffer order, padding included. A *chunk* is one file, a *tile* the unit in flight.
Chunks and tiles cut the array at fixed places, whatever the parameters are; an *extent* is what
one tile holds of one parameter's shard.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from tierstore.errors import LayoutError

__all__ = [
    "DEFAULT_TILE_NUMEL",
    "MAX_CHUNK_NUMEL",
    "TILE_NUMEL_MULTIPLE",
    "Extent",
    "Piece",
    "Shard",
    "StateLayout",
    "Tile",
]

MAX_CHUNK_NUMEL = 200_000_000
DEFAULT_TILE_NUMEL = 4 * 2**20
# 1024 fp32 elements are one 4096-byte block, the unit of direct I/O; 4096 elements of any type are
# whole blocks.
TILE_NUMEL_MULTIPLE = 1024
_ANY_TYPE_MULTIPLE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A block of a global tensor that a local tensor holds.

    Element ``i`` (a multi-index into `shape`) of the block is element
    ``local_offset + sum(i * local_strides)`` of the flattened local tensor and element
    ``global_offset + i`` of the global tensor `key`; leading axes that only the global tensor
    has (stacked layers) have length 1 in `shape`.

    Parameters
    ----------
    key
        Name of the global tensor, equal on every rank and topology.
    global_shape, global_offset, shape
        Extent of the global tensor, and where in it the block lies.
    local_offset, local_strides
        Where the block lies in the flattened local tensor, in elements.
    """

    key: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    shape: tuple[int, ...]
    local_offset: int
    local_strides: tuple[int, ...]

    def __post_init__(self) -> None:
        axes = (self.global_shape, self.global_offset, self.shape, self.local_strides)
        if len({len(axis) for axis in axes}) != 1:
            raise LayoutError(f"the shapes of a piece of {self.key!r} have different ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of one parameter that this rank owns, and its place in the array.

    Parameters
    ----------
    name
        The parameter's name, unique within the optimizer.
    numel
        Elements that this rank owns: the flat range ``[param_start, param_start + numel)`` of
        the rank's own (tensor-parallel) tensor.
    array_start
        First element of the shard in the array.
    param_start
        First element of the shard in the flattened local tensor.
    local_shape
        Shape of the local tensor.
    weight_dtype
        Type of the model's weight, by torch's name without the module (``bfloat16``).
    pieces
        How the local tensor maps onto global tensors; empty where the model does not say.
    """

    name: str
    numel: int
    array_start: int
    param_start: int = 0
    local_shape: tuple[int, ...]
    weight_dtype: str = "float32"
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous run of one shard within one tile.

    Parameters
    ----------
    shard
        Index of the shard in the layout.
    tile_start
        First element of the run in the tile.
    shard_start
        First element of the run in the shard.
    numel
        Elements of the run, at least 1.
    """

    shard: int
    tile_start: int
    shard_start: int
    numel: int

    @property
    def in_tile(self) -> slice:
        """The run's elements in the tile."""
        return slice(self.tile_start, self.tile_start + self.numel)

    @property
    def in_shard(self) -> slice:
        """The run's elements in the shard."""
        return slice(self.shard_start, self.shard_start + self.numel)


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile of the grid.

    Parameters
    ----------
    index
        Number of the tile in the array.
    start, numel
        Elements ``[start, start + numel)`` of the array; the last tile may be short.
    chunk, place
        Number of the chunk that holds the tile, and the tile's place in it.
    """

    index: int
    start: int
    numel: int
    chunk: int
    place: int


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """The grid that all arrays of one optimizer of one rank share, and the shards on it.

    Use `plan` to choose the grid. All sizes are in elements.

    Parameters
    ----------
    numel
        Length of the arrays, padding included.
    chunk_numel
        Length of a chunk, a multiple of `tile_numel`.
    tile_numel
        Length of a tile, a multiple of 1024.
    shards
        Sorted by `array_start`, disjoint.

    Raises
    ------
    LayoutError
        The sizes do not divide as said, the shards overlap or stick out, or two have one name.
    """

    numel: int
    chunk_numel: int
    tile_numel: int
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if self.tile_numel < 1 or self.tile_numel % TILE_NUMEL_MULTIPLE:
            raise LayoutError(
                f"tile_numel {self.tile_numel} is not a positive multiple of {TILE_NUMEL_MULTIPLE}"
            )
        if not 0 < self.chunk_numel <= MAX_CHUNK_NUMEL or self.chunk_numel % self.tile_numel:
            raise LayoutError(
                f"chunk_numel {self.chunk_numel} is not a multiple of tile_numel {self.tile_numel} "
                f"of at most {MAX_CHUNK_NUMEL}"
            )
        end = 0
        names = set()
        for shard in self.shards:
            if min(shard.numel, shard.param_start, *shard.local_shape, 0) < 0:
                raise LayoutError(f"shard {shard.name!r} has a negative size or start")
            if shard.array_start < end:
                raise LayoutError(
                    f"shard {shard.name!r} starts at element {shard.array_start} of the array, "
                    f"before the shard in front of it ends ({end})"
                )
            if shard.param_start + shard.numel > prod(shard.local_shape):
                raise LayoutError(
                    f"shard {shard.name!r} covers elements {shard.param_start} to "
                    f"{shard.param_start + shard.numel} of a tensor of shape {shard.local_shape}"
                )
            if shard.name in names:
                raise LayoutError(f"two shards are called {shard.name!r}")
            names.add(shard.name)
            end = shard.array_start + shard.numel
        if end > self.numel:
            raise LayoutError(f"the shards end at element {end} of an array of {self.numel}")

    @classmethod
    def plan(
        cls,
        shards: Sequence[Shard],
        *,
        numel: int | None = None,
        chunk_numel: int = MAX_CHUNK_NUMEL,
        tile_numel: int = DEFAULT_TILE_NUMEL,
        least_chunks: int = 1,
    ) -> StateLayout:
        """Choose tiles and chunks for these shards.

        A small array gets a small tile and chunk, never a sparse giant; a chunk is cut down to
        whole tiles, and a tile to a chunk that is smaller than the tile asked for.

        Parameters
        ----------
        shards
            In any order; they are sorted.
        numel
            Length of the array; None ends it with the last shard.
        chunk_numel, tile_numel
            The most elements of a chunk and of a tile.
        least_chunks
            Chunks are made smaller, down to one tile, to have so many: what is to be spread over
            several drives comes in chunks.

        Raises
        ------
        LayoutError
            As for the class, and for a chunk or tile under 1024 elements.
        """
        if min(chunk_numel, tile_numel) < TILE_NUMEL_MULTIPLE:
            raise LayoutError(
                f"chunks of {chunk_numel} and tiles of {tile_numel} elements were asked for; "
                f"the least of either is {TILE_NUMEL_MULTIPLE}"
            )
        ordered = tuple(sorted(shards, key=lambda shard: (shard.array_start, shard.numel)))
        if numel is None:
            numel = max((shard.array_start + shard.numel for shard in ordered), default=0)
        chunk_numel = min(chunk_numel, MAX_CHUNK_NUMEL)
        tile_numel = min(tile_numel, chunk_numel)
        # Tiles of fewer elements are for those who ask for them: narrow types can't share them.
        unit = _ANY_TYPE_MULTIPLE if tile_numel >= _ANY_TYPE_MULTIPLE else TILE_NUMEL_MULTIPLE
        tile_numel = min(tile_numel // unit * unit, max(_round_up(numel, unit), unit))
        tiles_per_chunk = min(chunk_numel // tile_numel, -(-numel // tile_numel) // least_chunks)
        chunk_numel = max(tiles_per_chunk, 1) * tile_numel
        return cls(numel=numel, chunk_numel=chunk_numel, tile_numel=tile_numel, shards=ordered)

    @property
    def n_tiles(self) -> int:
        """Tiles of each array."""
        return -(-self.numel // self.tile_numel)

    @property
    def n_chunks(self) -> int:
        """Chunks of each array."""
        return -(-self.numel // self.chunk_numel)

    @property
    def tiles_per_chunk(self) -> int:
        """Tiles of a full chunk."""
        return self.chunk_numel // self.tile_numel

    def tiles_in_chunk(self, chunk: int) -> int:
        """Tiles that chunk number `chunk` holds: fewer in the last one."""
        return min(self.tiles_per_chunk, self.n_tiles - chunk * self.tiles_per_chunk)

    def tile(self, index: int) -> Tile:
        """Tile number `index`.

        Raises
        ------
        LayoutError
            There is no such tile.
        """
        if not 0 <= index < self.n_tiles:
            raise LayoutError(f"tile {index} was asked for; the array has {self.n_tiles} tiles")
        start = index * self.tile_numel
        chunk, place = divmod(index, self.tiles_per_chunk)
        return Tile(index, start, min(self.tile_numel, self.numel - start), chunk, place)

    def tiles(self) -> Iterator[Tile]:
        """All tiles in order."""
        return (self.tile(index) for index in range(self.n_tiles))

    @cached_property
    def _starts(self) -> list[int]:
        return [shard.array_start for shard in self.shards]

    def extents(self, tile: int) -> tuple[Extent, ...]:
        """What tile number `tile` holds, in order; padding belongs to no extent."""
        grid = self.tile(tile)
        stop = grid.start + grid.numel
        # Only the last shard that starts at or in front of the tile can reach into it: shards are
        # disjoint, and of those that start at one place the empty ones come first.
        first = bisect_right(self._starts, grid.start)
        if first > 0 and self._end(first - 1) > grid.start:
            first -= 1
        found = []
        for index in range(first, bisect_left(self._starts, stop)):
            shard = self.shards[index]
            low, high = max(shard.array_start, grid.start), min(self._end(index), stop)
            if low < high:
                found.append(Extent(index, low - grid.start, low - shard.array_start, high - low))
        return tuple(found)

    def tiles_of(self, shard: int) -> range:
        """Numbers of the tiles that hold a part of shard number `shard`."""
        if not self.shards[shard].numel:
            return range(0)
        first = self.shards[shard].array_start // self.tile_numel
        return range(first, (self._end(shard) - 1) // self.tile_numel + 1)

    def _end(self, shard: int) -> int:
        return self.shards[shard].array_start + self.shards[shard].numel

    def to_json(self) -> dict[str, Any]:
        """The layout as plain JSON values; `from_json` is the inverse."""
        return {
            "numel": self.numel,
            "chunk_numel": self.chunk_numel,
            "tile_numel": self.tile_numel,
            "shards": [
                {
                    "name": shard.name,
                    "numel": shard.numel,
                    "array_start": shard.array_start,
                    "param_start": shard.param_start,
                    "local_shape": list(shard.local_shape),
                    "weight_dtype": shard.weight_dtype,
                    "pieces": [
                        {
                            "key": piece.key,
                            "global_shape": list(piece.global_shape),
                            "global_offset": list(piece.global_offset),
                            "shape": list(piece.shape),
                            "local_offset": piece.local_offset,
                            "local_strides": list(piece.local_strides),
                        }
                        for piece in shard.pieces
                    ],
                }
                for shard in self.shards
            ],
        }

    @classmethod
    def from_json(cls, value: Any) -> StateLayout:
        """Read what `to_json` wrote.

        Raises
        ------
        LayoutError
            The value is not a layout.
        """
        try:
            return cls(
                numel=_whole(value["numel"]),
                chunk_numel=_whole(value["chunk_numel"]),
                tile_numel=_whole(value["tile_numel"]),
                shards=tuple(_shard_from_json(shard) for shard in _list(value["shards"])),
            )
        except LayoutError:
            raise
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise LayoutError(f"this is not a layout: {reprlib.repr(error)}") from error

    def fingerprint(self) -> str:
        """A short text that is equal for equal layouts only."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _shard_from_json(value: Any) -> Shard:
    return Shard(
        name=_text(value["name"]),
        numel=_whole(value["numel"]),
        array_start=_whole(value["array_start"]),
        param_start=_whole(value["param_start"]),
        local_shape=_wholes(value["local_shape"]),
        weight_dtype=_text(value["weight_dtype"]),
        pieces=tuple(
            Piece(
                key=_text(piece["key"]),
                global_shape=_wholes(piece["global_shape"]),
                global_offset=_wholes(piece["global_offset"]),
                shape=_wholes(piece["shape"]),
                local_offset=_whole(piece["local_offset"]),
                local_strides=_wholes(piece["local_strides"]),
            )
            for piece in _list(value["pieces"])
        ),
    )


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise LayoutError(f"a whole number was expected, not {reprlib.repr(value)}")
    return value


def _wholes(values: Any) -> tuple[int, ...]:
    return tuple(_whole(value) for value in _list(values))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise LayoutError(f"a list was expected, not {reprlib.repr(value)}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise LayoutError(f"a text was expected, not {reprlib.repr(value)}")
    return value


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
