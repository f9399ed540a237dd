"""Where the elements of a shard lie in global tensors, and back. Pure integer arithmetic.

A shard is a flat range of a rank's local tensor, which consists of blocks of global tensors (its
pieces). A flat range of a block is at most ``2 * ndim - 1`` axis-aligned *regions*: the rest of a
first row, whole rows, the start of a last row, and so on for each axis. A part of a region, seen
from the flat tensor, is a *run* that repeats at constant distances. Costs depend on the number of
axes and pieces, never on the number of elements or rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from tierstore.errors import LayoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.layout import Piece, Shard

__all__ = ["Box", "Region", "Runs", "ShardCoordinates", "boxes_between", "merged_axes"]

# Sums of two places are exact in 64 bits.
_MOST_NUMEL = 2**62

# Offset and shape.
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """A run of elements that repeats at constant distances, along several axes.

    Parameters
    ----------
    start
        First element of the first run.
    run_numel
        Elements of each run.
    counts, strides
        How often runs repeat and how far apart they start, the outermost axis first.
    """

    start: int
    run_numel: int
    counts: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def n_runs(self) -> int:
        """Number of runs."""
        return prod(self.counts)

    @property
    def numel(self) -> int:
        """Elements of all runs."""
        return self.run_numel * self.n_runs

    def starts(self) -> NDArray[np.int64]:
        """The first element of each run: the one place that costs memory for each of them."""
        starts = np.array([self.start], np.int64)
        for count, stride in zip(self.counts, self.strides, strict=True):
            starts = np.add.outer(starts, stride * np.arange(count, dtype=np.int64)).reshape(-1)
        return starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """An axis-aligned block of a global tensor, and where its elements lie in a flat range.

    Parameters
    ----------
    key
        Name of the global tensor.
    offset, shape
        Where the block lies in the global tensor.
    start, strides
        Element ``i`` (a multi-index into `shape`) of the block is flat element
        ``start + sum(i * strides)``.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the block."""
        return prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last element of the block along each axis of the global tensor."""
        return tuple(map(sum, zip(self.offset, self.shape, strict=True)))

    def flat(self, index: Sequence[int]) -> int:
        """The flat element that is element `index` of the global tensor."""
        return self.start + sum(
            (element - first) * stride
            for element, first, stride in zip(index, self.offset, self.strides, strict=True)
        )

    def part(self, offset: Sequence[int], shape: Sequence[int]) -> Region | None:
        """What lies in another block of the same global tensor, if anything does."""
        low = tuple(map(max, zip(self.offset, offset, strict=True)))
        end = tuple(map(sum, zip(offset, shape, strict=True)))
        size = tuple(min(ends) - first for *ends, first in zip(self.end, end, low, strict=True))
        if any(length <= 0 for length in size):
            return None
        return Region(
            key=self.key, offset=low, shape=size, start=self.flat(low), strides=self.strides
        )

    def runs(self) -> Runs:
        """The block as runs of flat elements."""
        shape, (strides,) = merged_axes(self.shape, self.strides)
        if strides and strides[-1] == 1:
            return Runs(
                start=self.start, run_numel=shape[-1], counts=shape[:-1], strides=strides[:-1]
            )
        return Runs(start=self.start, run_numel=1, counts=shape, strides=strides)


class ShardCoordinates:
    """The way from a shard's flat elements to global tensors and back.

    Flat elements are those of the local tensor. The array's element of flat element ``e`` is
    ``e + array_shift``.

    Parameters
    ----------
    shard
        The shard; without pieces it has no regions.

    Raises
    ------
    LayoutError
        A piece sticks out of the local or the global tensor, two of its elements or two pieces
        share one element of the local tensor, or this can't be told.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.array_shift = shard.array_start - shard.param_start
        # Pieces without elements say nothing.
        self._pieces = [piece for piece in shard.pieces if prod(piece.shape)]
        for piece in self._pieces:
            _check(piece, shard)
        if len(self._pieces) > 1:
            _check_disjoint(self._pieces, shard)

    def regions(self, start: int | None = None, stop: int | None = None) -> tuple[Region, ...]:
        """The blocks of global tensors that make up flat elements ``[start, stop)``.

        At most ``2 * ndim - 1`` for each piece; elements that belong to no piece are in none.

        Parameters
        ----------
        start, stop
            A range of the local tensor, which may reach beyond the shard; by default the shard's.
        """
        start = self.shard.param_start if start is None else start
        stop = self.shard.param_start + self.shard.numel if stop is None else stop
        return tuple(region for piece in self._pieces for region in _regions(piece, start, stop))

    @cached_property
    def _own(self) -> tuple[Region, ...]:
        return self.regions()

    def runs(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> tuple[Runs, ...]:
        """Which flat elements of the shard lie in a block of a global tensor.

        Parameters
        ----------
        key, offset, shape
            The global tensor and the block.
        """
        parts = (region.part(offset, shape) for region in self._own if region.key == key)
        return tuple(part.runs() for part in parts if part is not None)


def boxes_between(
    shape: Sequence[int], strides: Sequence[int], low: int, high: int
) -> Iterator[Box]:
    """Boxes of the multi-indices ``i`` with ``low <= sum(i * strides) < high``.

    Parameters
    ----------
    shape
        Extent of the multi-indices, no axis empty.
    strides
        For each axis more than all axes of smaller stride reach together, so that equal places
        are equal multi-indices; in any order.
    low, high
        The range.

    Yields
    ------
    tuple
        Offset and shape of a box, in ascending order of place; at most ``2 * ndim - 1``.
    """
    axes = sorted(
        (axis for axis, length in enumerate(shape) if length > 1), key=lambda axis: -strides[axis]
    )
    lengths = [shape[axis] for axis in axes]
    ordered = [strides[axis] for axis in axes]
    first, stop = _rank(low, lengths, ordered), _rank(high, lengths, ordered)
    for starts, sizes in _boxes(lengths, first, stop):
        offset, size = [0] * len(shape), [1] * len(shape)
        for axis, start, length in zip(axes, starts, sizes, strict=True):
            offset[axis], size[axis] = start, length
        yield tuple(offset), tuple(size)


def merged_axes(
    shape: Sequence[int], *strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The same elements with as few axes as possible.

    Parameters
    ----------
    shape
        Extent of the multi-indices.
    *strides
        Strides of one or several flat images of them.

    Returns
    -------
    tuple, tuple of tuple
        Shape and strides without axes of length 1, by descending strides of the first image, and
        neighbours joined where they are one axis in all images.
    """
    axes = sorted(
        ((length, *steps) for length, *steps in zip(shape, *strides, strict=True) if length != 1),
        key=lambda axis: -axis[1],
    )
    merged: list[tuple[int, ...]] = []
    for length, *steps in axes:
        if merged and all(
            outer == inner * length for outer, inner in zip(merged[-1][1:], steps, strict=True)
        ):
            merged[-1] = (merged[-1][0] * length, *steps)
        else:
            merged.append((length, *steps))
    if not merged:
        return (), ((),) * len(strides)
    lengths, *columns = zip(*merged, strict=True)
    return lengths, tuple(columns)


def _rank(place: int, lengths: Sequence[int], strides: Sequence[int]) -> int:
    """How many multi-indices, in row-major order, lie in front of a place."""
    if place <= 0:
        return 0
    rank = 0
    for axis, (length, stride) in enumerate(zip(lengths, strides, strict=True)):
        digit = place // stride
        if digit >= length:
            return (rank + 1) * prod(lengths[axis:])
        rank = rank * length + digit
        place -= digit * stride
    return rank + (place > 0)


def _boxes(lengths: Sequence[int], first: int, stop: int) -> Iterator[Box]:
    """The multi-indices of rank `first` to `stop` as boxes."""
    if first >= stop:
        return
    if not lengths:
        yield (), ()
        return
    below = lengths[1:]
    inner = prod(below)
    head, head_rest = divmod(first, inner)
    tail, tail_rest = divmod(stop, inner)
    if head == tail:
        yield from _under(head, _boxes(below, head_rest, tail_rest))
        return
    if head_rest:
        yield from _under(head, _boxes(below, head_rest, inner))
        head += 1
    if head < tail:
        yield (head, *(0 for _ in below)), (tail - head, *below)
    yield from _under(tail, _boxes(below, 0, tail_rest))


def _under(index: int, boxes: Iterator[Box]) -> Iterator[Box]:
    return (((index, *offset), (1, *shape)) for offset, shape in boxes)


def _regions(piece: Piece, start: int, stop: int) -> Iterator[Region]:
    low, high = start - piece.local_offset, stop - piece.local_offset
    for offset, shape in boxes_between(piece.shape, piece.local_strides, low, high):
        yield Region(
            key=piece.key,
            offset=tuple(map(sum, zip(piece.global_offset, offset, strict=True))),
            shape=shape,
            start=piece.local_offset
            + sum(map(prod, zip(offset, piece.local_strides, strict=True))),
            strides=piece.local_strides,
        )


def _check(piece: Piece, shard: Shard) -> None:
    # What is at rest may say anything.
    if max(prod(shard.local_shape), 0, *piece.global_shape) >= _MOST_NUMEL:
        raise LayoutError(f"shard {shard.name!r} has a piece of an impossibly large tensor")
    for length, offset, whole in zip(
        piece.shape, piece.global_offset, piece.global_shape, strict=True
    ):
        if min(length, offset) < 0 or offset + length > whole:
            raise LayoutError(
                f"shard {shard.name!r} has a piece {piece.shape} at {piece.global_offset} of "
                f"{piece.key!r}, which is {piece.global_shape}"
            )
    reach = 0
    axes = sorted(zip(piece.local_strides, piece.shape, strict=True))
    for stride, length in axes:
        if length > 1:
            if stride <= reach:
                raise LayoutError(
                    f"shard {shard.name!r} has a piece {piece.shape} of {piece.key!r} with strides "
                    f"{piece.local_strides}: rows lie in one another"
                )
            reach += stride * (length - 1)
    if piece.local_offset < 0 or piece.local_offset + reach >= prod(shard.local_shape):
        raise LayoutError(
            f"shard {shard.name!r} has a piece of {piece.key!r} that ends at element "
            f"{piece.local_offset + reach} of a tensor of shape {shard.local_shape}"
        )


def _check_disjoint(pieces: Sequence[Piece], shard: Shard) -> None:
    """Refuse pieces that share an element: one that is there twice could hide one that is not."""
    merged = [merged_axes(piece.shape, piece.local_strides) for piece in pieces]
    # In the flat tensor cut into rows by each stride, every piece is a box.
    grid = sorted({1, *(stride for _, (strides,) in merged for stride in strides)}, reverse=True)
    radices = [prod(shard.local_shape), *(a // b for a, b in pairwise(grid))]
    is_grid = all(a % b == 0 for a, b in pairwise(grid))
    low = np.zeros((len(pieces), len(grid)), np.int64)
    size = np.ones_like(low)
    for index, (piece, (shape, (strides,))) in enumerate(zip(pieces, merged, strict=True)):
        place = piece.local_offset
        for axis, step in enumerate(grid):
            low[index, axis], place = divmod(place, step)
        for length, stride in zip(shape, strides, strict=True):
            axis, left = grid.index(stride), length
            # A long axis that the grid cuts into whole rows.
            while axis and low[index, axis] + left > radices[axis]:
                is_grid = is_grid and low[index, axis] == 0 and left % radices[axis] == 0
                size[index, axis] = radices[axis]
                left //= radices[axis]
                axis -= 1
            size[index, axis] = left
    if not is_grid:
        raise LayoutError(
            f"the pieces of shard {shard.name!r} are cut in ways that do not go together; whether "
            "they overlap can't be told"
        )
    high = low + size
    for index in range(1, len(pieces)):
        if ((low[:index] < high[index]) & (high[:index] > low[index])).all(axis=1).any():
            raise LayoutError(f"two pieces of shard {shard.name!r} share elements of its tensor")
