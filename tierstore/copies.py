"""`Copy`: elements of a saved array and where they go, along as few strided axes as possible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore.coordinates import Box, boxes_between, merged_axes
from tierstore.errors import LayoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Copy", "SourceId"]


@dataclass(frozen=True, slots=True, order=True)
class SourceId:
    """The arrays of one optimizer of one rank that was saved."""

    rank: int
    optimizer: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.optimizer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Elements of a source's arrays and where they go.

    Element ``i`` (a multi-index into `shape`) is ``source_start + sum(i * source_strides)`` there
    and ``target_start + sum(i * target_strides)`` here.

    Parameters
    ----------
    source
        Which arrays.
    source_shard, target_shard
        Indices of the two shards in their layouts.
    source_start, target_start
        Places in the arrays.
    shape, source_strides, target_strides
        As few axes as possible, by descending target strides; one axis of stride 1 is one run.
    """

    source: SourceId
    source_shard: int
    target_shard: int
    source_start: int
    target_start: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements to copy."""
        return prod(self.shape)

    @property
    def source_stop(self) -> int:
        """One past the last place in the source."""
        return self.source_start + _reach(self.shape, self.source_strides) + 1

    @property
    def target_stop(self) -> int:
        """One past the last place in the target."""
        return self.target_start + _reach(self.shape, self.target_strides) + 1

    def of_source(self, start: int, stop: int) -> Iterator[Copy]:
        """The parts whose elements lie in ``[start, stop)`` of the source."""
        low, high = start - self.source_start, stop - self.source_start
        return self._parts(boxes_between(self.shape, self.source_strides, low, high))

    def of_target(self, start: int, stop: int) -> Iterator[Copy]:
        """The parts whose elements go to ``[start, stop)`` of the target."""
        low, high = start - self.target_start, stop - self.target_start
        return self._parts(boxes_between(self.shape, self.target_strides, low, high))

    def _parts(self, boxes: Iterable[Box]) -> Iterator[Copy]:
        for offset, shape in boxes:
            size, (target_strides, source_strides) = merged_axes(
                shape, self.target_strides, self.source_strides
            )
            yield replace(
                self,
                source_start=self.source_start + _dot(offset, self.source_strides),
                target_start=self.target_start + _dot(offset, self.target_strides),
                shape=size,
                source_strides=source_strides,
                target_strides=target_strides,
            )

    def moved(self, source: int, target: int) -> Copy:
        """The same with places counted from `source` in the source and from `target` here."""
        return replace(
            self,
            source_start=self.source_start - source,
            target_start=self.target_start - target,
        )

    def apply(self, source: NDArray[Any], target: NDArray[Any]) -> None:
        """Copy between flat arrays that begin where this copy counts from.

        Raises
        ------
        LayoutError
            A place is outside of an array.
        """
        for array, start, stop in (
            (source, self.source_start, self.source_stop),
            (target, self.target_start, self.target_stop),
        ):
            # What follows reads and writes memory by these numbers.
            if start < 0 or stop > array.size or array.ndim != 1 or not array.flags.c_contiguous:
                raise LayoutError(f"elements {start} to {stop} of an array of shape {array.shape}")
        if source.dtype != target.dtype:
            raise LayoutError(f"elements of type {source.dtype} do not go to {target.dtype}")
        _view(target, self.target_start, self.shape, self.target_strides, writeable=True)[...] = (
            _view(source, self.source_start, self.shape, self.source_strides, writeable=False)
        )


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(element * stride for element, stride in zip(index, strides, strict=True))


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    return sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def _view(
    array: NDArray[Any],
    start: int,
    shape: Sequence[int],
    strides: Sequence[int],
    *,
    writeable: bool,
) -> NDArray[Any]:
    steps = [stride * array.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(array[start:], shape, steps, writeable=writeable)
