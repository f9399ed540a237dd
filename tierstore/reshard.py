"""What to copy from where, to fill a rank's arrays with state that was saved on another topology.

Elements are matched by global tensor and place in it (the pieces of a shard), whatever the ranks,
optimizers and shards are that hold them. Pure: no I/O, no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tierstore.coordinates import Box, Region, ShardCoordinates, merged_axes
from tierstore.copies import Copy, SourceId
from tierstore.errors import LayoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.layout import Piece, Shard, StateLayout

__all__ = ["Held", "Holders", "Plan", "TileRead", "array_regions", "plan"]

_MOST_NAMES = 20


@dataclass(frozen=True, slots=True)
class TileRead:
    """What one tile of a source gives to one tile of the target.

    Parameters
    ----------
    source, tile
        Which arrays, and number of the tile.
    copies
        With places counted from the starts of the two tiles.
    """

    source: SourceId
    tile: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All copies that fill the shards of a layout, each element once.

    Parameters
    ----------
    target
        The layout to fill.
    sources
        The layouts that are read, and no others.
    copies
        By source, then place in the source.
    """

    target: StateLayout
    sources: Mapping[SourceId, StateLayout]
    copies: tuple[Copy, ...]

    @cached_property
    def _spans(self) -> NDArray[np.int64]:
        spans = [(copy.target_start, copy.target_stop) for copy in self.copies]
        return np.array(spans, np.int64).reshape(-1, 2)

    def reads(self, tile: int) -> Iterator[TileRead]:
        """What fills tile number `tile` of the target, tile by tile of the sources, each once.

        What no read fills is padding, and zero.
        """
        grid = self.target.tile(tile)
        stop = grid.start + grid.numel
        found: defaultdict[tuple[SourceId, int], list[Copy]] = defaultdict(list)
        touching = (self._spans[:, 0] < stop) & (self._spans[:, 1] > grid.start)
        for index in np.flatnonzero(touching):
            copy = self.copies[index]
            tile_numel = self.sources[copy.source].tile_numel
            for part in copy.of_target(grid.start, stop):
                first, last = part.source_start, part.source_stop - 1
                for number in range(first // tile_numel, last // tile_numel + 1):
                    start = number * tile_numel
                    found[copy.source, number] += (
                        piece.moved(start, grid.start)
                        for piece in part.of_source(start, start + tile_numel)
                    )
        for (source, number), copies in sorted(found.items()):
            if copies:
                yield TileRead(source, number, tuple(copies))

    def covering(self) -> dict[int, dict[tuple[SourceId, int], None]]:
        """For each shard of the target that has elements, the source shards that fill it."""
        covering: defaultdict[int, dict[tuple[SourceId, int], None]] = defaultdict(dict)
        for copy in self.copies:
            covering[copy.target_shard][copy.source, copy.source_shard] = None
        return dict(covering)


def plan(
    target: StateLayout,
    sources: Mapping[SourceId, StateLayout],
    *,
    rank: int | None = None,
    by_name: bool = True,
) -> Plan:
    """Find the copies that fill every shard of a layout from saved ones.

    Of several sources that hold an element, the one of the same rank is taken, then the one whose
    shard has the same name, then the first; but those that hold the same local tensor, if they
    hold all of the shard, come before all others.

    Parameters
    ----------
    target
        The layout to fill.
    sources
        What was saved, all ranks and optimizers.
    rank
        The rank that the target belongs to.
    by_name
        Shards without pieces are found by name, shape and flat range; with False they count as
        missing. Such names are those of one topology: on another one, equal names may be other
        parameters.

    Raises
    ------
    LayoutError
        Elements that nobody saved, global tensors of another shape, or a shard without pieces
        that several other ranks have.
    """
    index = _Index(target, sources, by_name=by_name)
    copies: list[Copy] = []
    missing: dict[str, int] = {}
    for number, shard in enumerate(target.shards):
        found = index.copies(number, shard, rank)
        lacking = shard.numel - sum(copy.numel for copy in found)
        if lacking:
            missing[shard.name] = lacking
        copies += found
    if missing:
        raise LayoutError(_say_missing(missing, target))
    copies.sort(key=lambda copy: (copy.source, copy.source_start, copy.target_start))
    used = {copy.source for copy in copies}
    return Plan(
        target=target,
        sources={source: sources[source] for source in sorted(used)},
        copies=tuple(copies),
    )


class Held(NamedTuple):
    """A region that a source's shard holds; its flat elements are those of the array."""

    source: SourceId
    number: int
    name: str
    region: Region


class Holders:
    """All that hold a part of one tensor, by source."""

    def __init__(self) -> None:
        self.entries: list[Held] = []

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.array([entry.region.offset for entry in self.entries], np.int64)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.array([entry.region.end for entry in self.entries], np.int64)

    def copies(self, number: int, name: str, wanted: Region, rank: int | None) -> Iterator[Copy]:
        """Copies into a region of shard `number` of the target, as far as there are any.

        No element is copied twice; the holders on `rank` come first, then those of the same name.
        """
        low = np.maximum(self._starts, wanted.offset)
        high = np.minimum(self._ends, wanted.end)
        order = sorted(
            np.flatnonzero((low < high).all(axis=1)).tolist(),
            key=lambda index: (
                self.entries[index].source.rank != rank,
                self.entries[index].name != name,
            ),
        )
        low, high = low[order], high[order]
        lacking = wanted.numel
        for place, index in enumerate(order):
            held = self.entries[index]
            # Those in front of this one have filled what they hold.
            filled = (low[:place] < high[place]) & (high[:place] > low[place])
            boxes = [(tuple(low[place].tolist()), tuple(high[place].tolist()))]
            for other in np.flatnonzero(filled.all(axis=1)):
                cut = tuple(low[other].tolist()), tuple(high[other].tolist())
                boxes = [rest for box in boxes for rest in _without(box, cut)]
            for first, end in boxes:
                size = tuple(b - a for a, b in zip(first, end, strict=True))
                shape, (target_strides, source_strides) = merged_axes(
                    size, wanted.strides, held.region.strides
                )
                yield Copy(
                    source=held.source,
                    source_shard=held.number,
                    target_shard=number,
                    source_start=held.region.flat(first),
                    target_start=wanted.flat(first),
                    shape=shape,
                    source_strides=source_strides,
                    target_strides=target_strides,
                )
                lacking -= prod(size)
            if not lacking:
                return


class _Index:
    """Who holds what a target wants."""

    def __init__(
        self, target: StateLayout, sources: Mapping[SourceId, StateLayout], *, by_name: bool
    ) -> None:
        self._wanted = _global_shapes(target, sources)
        self._by_name = by_name
        self._saved = [
            (source, number, shard)
            for source in sorted(sources)
            for number, shard in enumerate(sources[source].shards)
            if shard.numel
        ]

    @cached_property
    def _same(self) -> defaultdict[Any, Holders]:
        """Flat ranges of local tensors, by what says that two of them are the same tensor."""
        found: defaultdict[Any, Holders] = defaultdict(Holders)
        for source, number, shard in self._saved:
            held = Held(source, number, shard.name, _flat_range(shard))
            found[_same_tensor(shard)].entries.append(held)
        return found

    @cached_property
    def _global(self) -> defaultdict[str, Holders]:
        """Regions of global tensors, by their keys."""
        found: defaultdict[str, Holders] = defaultdict(Holders)
        for source, number, shard in self._saved:
            if any(piece.key in self._wanted for piece in shard.pieces):
                for region in array_regions(shard):
                    held = Held(source, number, shard.name, region)
                    found[region.key].entries.append(held)
        return found

    def copies(self, number: int, shard: Shard, rank: int | None) -> list[Copy]:
        """All that can be found for a shard, each element once."""
        if not shard.numel:
            return []
        same = self._same.get(_same_tensor(shard))
        if not shard.pieces:
            if same is None or not self._by_name:
                return []
            _require_one(shard, same, rank)
        # Where the local tensor is cut up in another way only, its flat ranges are long runs,
        # whatever its pieces are.
        wanted = _flat_range(shard)
        found = [] if same is None else list(same.copies(number, shard.name, wanted, rank))
        if sum(copy.numel for copy in found) < shard.numel and shard.pieces:
            found = [
                copy
                for region in array_regions(shard)
                if region.key in self._global
                for copy in self._global[region.key].copies(number, shard.name, region, rank)
            ]
        return _joined(found)


def _same_tensor(shard: Shard) -> Any:
    """Equal for shards of one local tensor; without pieces, for equal ranges of equal names."""
    if shard.pieces:
        return shard.local_shape, shard.pieces
    return shard.local_shape, shard.name, shard.param_start, shard.numel


def _require_one(shard: Shard, same: Holders, rank: int | None) -> None:
    sources = [entry.source for entry in same.entries]
    ranks = {source.rank for source in sources}
    if len(ranks) > 1 and rank not in ranks:
        raise LayoutError(
            f"{shard.name} has no place in global tensors, and several ranks saved one of this "
            f"name, shape and range ({', '.join(map(str, sources[:5]))}), but rank {rank} did not: "
            "which one it is can't be told. Load on the topology that it was saved on"
        )


def _flat_range(shard: Shard) -> Region:
    return Region(
        key=shard.name,
        offset=(shard.param_start,),
        shape=(shard.numel,),
        start=shard.array_start,
        strides=(1,),
    )


def array_regions(shard: Shard) -> Iterator[Region]:
    """The regions of a shard, with the array's elements for flat ones."""
    coordinates = ShardCoordinates(shard)
    for region in coordinates.regions():
        yield replace(region, start=region.start + coordinates.array_shift)


def _without(box: Box, cut: Box) -> Iterator[Box]:
    """What is left of a box, as boxes from first to end, when another one is cut out."""
    low, high = map(list, box)
    if any(a >= d or b <= c for a, b, c, d in zip(low, high, *cut, strict=True)):
        yield box
        return
    for axis, (first, end) in enumerate(zip(*cut, strict=True)):
        if low[axis] < first:
            yield tuple(low), (*high[:axis], first, *high[axis + 1 :])
            low[axis] = first
        if high[axis] > end:
            yield (*low[:axis], end, *low[axis + 1 :]), tuple(high)
            high[axis] = end


def _joined(copies: list[Copy]) -> list[Copy]:
    """Copies of one target shard, runs that go on in both arrays made one."""
    joined: list[Copy] = []
    for copy in sorted(copies, key=lambda copy: copy.target_start):
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.source, last.source_shard) == (copy.source, copy.source_shard)
            and (last.source_stop, last.target_stop) == (copy.source_start, copy.target_start)
            and _is_run(last)
            and _is_run(copy)
        ):
            joined[-1] = replace(
                last, shape=(last.numel + copy.numel,), source_strides=(1,), target_strides=(1,)
            )
        else:
            joined.append(copy)
    return joined


def _is_run(copy: Copy) -> bool:
    return copy.numel == 1 or (copy.source_strides, copy.target_strides) == ((1,), (1,))


def _global_shapes(
    target: StateLayout, sources: Mapping[SourceId, StateLayout]
) -> dict[str, tuple[int, ...]]:
    """The global tensors that a target wants; whoever has saved one agrees on its shape."""
    wanted: dict[str, tuple[int, ...]] = {}
    for piece in _pieces(target):
        wanted.setdefault(piece.key, piece.global_shape)
    differing: dict[str, str] = {}
    for where, layout in [("here", target), *((str(key), sources[key]) for key in sorted(sources))]:
        for piece in _pieces(layout):
            shape = wanted.get(piece.key, piece.global_shape)
            if shape != piece.global_shape and piece.key not in differing:
                differing[piece.key] = (
                    f"{piece.key} is {shape} here and {piece.global_shape} in {where}"
                )
    if differing:
        raise LayoutError(
            "global tensors have other shapes than those that were saved: "
            f"{_some(list(differing.values()), '; ')}. Build the same model (for an embedding, "
            "with the same padded vocabulary)"
        )
    return wanted


def _pieces(layout: StateLayout) -> Iterator[Piece]:
    return (piece for shard in layout.shards for piece in shard.pieces)


def _say_missing(missing: Mapping[str, int], target: StateLayout) -> str:
    names = [f"{name} ({numel:,} elements)" for name, numel in missing.items()]
    unlisted = [shard.name for shard in target.shards if shard.name in missing and not shard.pieces]
    advice = "Load what the same model saved, all ranks of it"
    if unlisted:
        advice += (
            f"; {_some(unlisted)} can be loaded only on the topology that saved it, since the "
            "model's sharded_state_dict does not list it"
        )
    return (
        f"nobody saved {sum(missing.values()):,} elements of {len(missing)} parameters: "
        f"{_some(names)}. {advice}"
    )


def _some(texts: Sequence[str], between: str = ", ") -> str:
    more = f" and {len(texts) - _MOST_NAMES} more" if len(texts) > _MOST_NAMES else ""
    return between.join(texts[:_MOST_NAMES]) + more
