"""Flat ranges of shards and blocks of global tensors, against element-by-element loops."""

from __future__ import annotations

import itertools
import sys
import tracemalloc
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tierstore.coordinates import Runs, ShardCoordinates, boxes_between, merged_axes
from tierstore.errors import LayoutError
from tierstore.layout import Piece, Shard


def piece(**changed: Any) -> Piece:
    fields: dict[str, Any] = {
        "key": "k",
        "global_shape": (4, 6),
        "global_offset": (0, 0),
        "shape": (4, 6),
        "local_offset": 0,
        "local_strides": (6, 1),
    }
    return Piece(**fields | changed)


def shard(*pieces: Piece, **changed: Any) -> Shard:
    fields: dict[str, Any] = {
        "name": "p",
        "numel": 24,
        "array_start": 0,
        "local_shape": (4, 6),
        "pieces": pieces,
    }
    return Shard(**fields | changed)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Piece, int]:
    """A block in some order of axes within a padded local tensor, and that tensor's length."""
    ndim = draw(st.integers(0, 4))
    shape = [draw(st.integers(1, 4)) for _ in range(ndim)]
    strides, reach = [0] * ndim, 1
    for axis in draw(st.permutations(range(ndim))):
        strides[axis] = reach + draw(st.integers(0, 3)) if reach > 1 or shape[axis] > 1 else 0
        if shape[axis] > 1:
            reach = strides[axis] * shape[axis]
    offset = [draw(st.integers(0, 3)) for _ in range(ndim)]
    start = draw(st.integers(0, 5))
    found = Piece(
        key="k",
        global_shape=tuple(a + b + 1 for a, b in zip(shape, offset, strict=True)),
        global_offset=tuple(offset),
        shape=tuple(shape),
        local_offset=start,
        local_strides=tuple(strides),
    )
    return found, start + reach + draw(st.integers(0, 4))


def elements(found: Piece) -> dict[int, tuple[int, ...]]:
    """By brute force: flat local element to global element."""
    return {
        found.local_offset
        + sum(i * s for i, s in zip(index, found.local_strides, strict=True)): tuple(
            i + o for i, o in zip(index, found.global_offset, strict=True)
        )
        for index in itertools.product(*map(range, found.shape))
    }


@given(pieces(), st.data())
@settings(max_examples=400)
def test_regions_are_the_elements_of_a_range_in_few_blocks(
    drawn: tuple[Piece, int], data: st.DataObject
) -> None:
    found, numel = drawn
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    place = shard(found, numel=stop - start, param_start=start, local_shape=(numel,))
    regions = ShardCoordinates(place).regions()
    seen: dict[int, tuple[int, ...]] = {}
    for region in regions:
        for index in itertools.product(
            *(range(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))
        ):
            flat = region.flat(index)
            assert flat not in seen
            seen[flat] = index
        assert region.numel == np.prod(region.shape, dtype=int)
    assert seen == {k: v for k, v in elements(found).items() if start <= k < stop}
    assert len(regions) <= max(2 * sum(length > 1 for length in found.shape) - 1, 1)


@given(pieces(), st.data())
@settings(max_examples=400)
def test_runs_are_the_elements_of_a_block(drawn: tuple[Piece, int], data: st.DataObject) -> None:
    found, numel = drawn
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    offset = [data.draw(st.integers(0, n)) for n in found.global_shape]
    shape = [
        data.draw(st.integers(0, n - o)) for n, o in zip(found.global_shape, offset, strict=True)
    ]
    place = shard(found, numel=stop - start, param_start=start, local_shape=(numel,))
    seen: list[int] = []
    for runs in ShardCoordinates(place).runs("k", offset, shape):
        assert len(runs.starts()) == runs.n_runs
        for first in runs.starts().tolist():
            seen += range(first, first + runs.run_numel)
        assert runs.numel == runs.n_runs * runs.run_numel > 0
    assert sorted(seen) == sorted(
        flat
        for flat, index in elements(found).items()
        if start <= flat < stop
        and all(o <= i < o + n for i, o, n in zip(index, offset, shape, strict=True))
    )
    assert ShardCoordinates(place).runs("other", offset, shape) == ()


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=4),
    st.integers(-3, 60),
    st.integers(-3, 60),
)
def test_boxes_come_in_order_of_place(axes: list[tuple[int, int]], low: int, high: int) -> None:
    strides, reach = [], 1
    for length, gap in axes:
        strides.append(reach + gap)
        reach = (reach + gap) * length
    shape = [length for length, _ in axes]
    places: list[int] = []
    for offset, size in boxes_between(shape, strides, low, high):
        ranges = [range(o, o + n) for o, n in zip(offset, size, strict=True)]
        places += sorted(
            sum(i * s for i, s in zip(index, strides, strict=True))
            for index in itertools.product(*ranges)
        )
    every = (
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    )
    assert places == sorted(place for place in every if low <= place < high)


def test_merged_axes_join_only_what_is_one_axis_in_all_images() -> None:
    assert merged_axes((2, 3, 4), (12, 4, 1)) == ((24,), ((1,),))
    assert merged_axes((2, 1, 3, 4), (24, 7, 4, 1)) == ((2, 12), ((24, 1),))
    assert merged_axes((3, 2), (1, 3)) == ((6,), ((1,),))
    assert merged_axes((2, 3, 4), (12, 4, 1), (24, 4, 1)) == ((2, 12), ((12, 1), (24, 1)))
    assert merged_axes((1, 1), (5, 1), (3, 9)) == ((), ((), ()))


def test_a_column_split_of_two_billion_elements_is_a_few_objects() -> None:
    rows, columns = 256_000, 8192
    half = piece(
        global_shape=(rows, 2 * columns),
        global_offset=(0, columns),
        shape=(rows, columns),
        local_strides=(columns, 1),
    )
    numel = rows * columns - 10
    place = shard(half, numel=numel - 7, param_start=7, local_shape=(rows, columns))
    tracemalloc.start()
    try:
        coordinates = ShardCoordinates(place)
        regions = coordinates.regions()
        (runs,) = coordinates.runs("k", (1000, columns + 5), (200_000, 100))
        others = coordinates.runs("k", (0, 0), (rows, columns + 1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(regions) == 3
    assert sum(region.numel for region in regions) == numel - 7
    assert runs == Runs(
        start=1000 * columns + 5, run_numel=100, counts=(200_000,), strides=(columns,)
    )
    assert sys.getsizeof(runs) < 200
    # The first row's element is in front of the shard; the last row is one of its own.
    assert [runs.numel for runs in others] == [rows - 2, 1]
    assert peak < 100_000


def test_the_place_in_the_array_is_a_shift() -> None:
    place = shard(piece(), numel=5, param_start=10, array_start=2000)
    assert ShardCoordinates(place).array_shift == 1990


def test_a_range_may_reach_beyond_the_shard_where_it_is_named() -> None:
    place = shard(piece(), numel=5, param_start=10)
    assert sum(region.numel for region in ShardCoordinates(place).regions()) == 5
    assert sum(region.numel for region in ShardCoordinates(place).regions(0, 24)) == 24


def test_a_scalar_is_one_region_without_axes() -> None:
    one = piece(global_shape=(), global_offset=(), shape=(), local_strides=())
    (region,) = ShardCoordinates(shard(one, numel=1, local_shape=())).regions()
    assert (region.numel, region.start, region.offset) == (1, 0, ())
    assert region.runs() == Runs(start=0, run_numel=1)


def test_shards_without_pieces_or_elements_have_no_regions() -> None:
    assert ShardCoordinates(shard()).regions() == ()
    empty = piece(shape=(0, 6))
    assert ShardCoordinates(shard(empty, numel=0, local_shape=(0, 6))).regions() == ()
    assert ShardCoordinates(shard(piece(), numel=0)).regions() == ()


def test_halves_of_a_gated_tensor_are_told_apart() -> None:
    # (2 experts, 2, 2 x 3): the halves of the last axis are columns of the local tensor.
    halves = [
        piece(
            key=key,
            global_shape=(2, 2, 3),
            global_offset=(0, 0, 0),
            shape=(2, 2, 3),
            local_offset=offset,
            local_strides=(12, 6, 1),
        )
        for key, offset in (("gate", 0), ("up", 3))
    ]
    coordinates = ShardCoordinates(shard(*halves, numel=9, param_start=4))
    assert {region.key: region.numel for region in coordinates.regions(0, 24)} == {
        "gate": 12,
        "up": 12,
    }
    assert [region.key for region in coordinates.regions()] == ["gate", "gate", "up", "up"]
    (runs,) = coordinates.runs("up", (0, 1, 0), (1, 1, 3))
    assert (runs.start, runs.run_numel) == (9, 3)


def first_and_rest(rest_offset: int, rest_numel: int) -> list[Piece]:
    """Two rows as such, and a flat rest."""
    rows = piece(global_shape=(2, 4), global_offset=(0, 0), shape=(2, 4), local_strides=(6, 1))
    rest = piece(
        key="rest",
        global_shape=(rest_numel,),
        global_offset=(0,),
        shape=(rest_numel,),
        local_offset=rest_offset,
        local_strides=(1,),
    )
    return [rows, rest]


def test_pieces_of_different_forms_are_compared() -> None:
    assert len(ShardCoordinates(shard(*first_and_rest(12, 12))).regions()) >= 2
    assert len(ShardCoordinates(shard(*first_and_rest(4, 2))).regions()) >= 2
    with pytest.raises(LayoutError, match="share elements"):
        ShardCoordinates(shard(*first_and_rest(3, 2)))
    with pytest.raises(LayoutError, match="share elements"):
        ShardCoordinates(shard(*first_and_rest(6, 12)))
    with pytest.raises(LayoutError, match="can't be told"):
        ShardCoordinates(shard(*first_and_rest(10, 14)))
    odd = piece(shape=(2, 2), local_strides=(5, 2), local_offset=12)
    with pytest.raises(LayoutError, match="can't be told"):
        ShardCoordinates(shard(piece(shape=(2, 4)), odd))


@given(pieces(), pieces())
@settings(max_examples=300)
def test_no_two_pieces_that_share_an_element_pass(
    one: tuple[Piece, int], two: tuple[Piece, int]
) -> None:
    share = bool(elements(one[0]).keys() & elements(two[0]).keys())
    numel = max(one[1], two[1])
    refusal = ""
    try:
        ShardCoordinates(shard(one[0], two[0], numel=numel, local_shape=(numel,)))
    except LayoutError as error:
        refusal = str(error)
    if share:
        assert refusal
    else:
        assert not refusal or "can't be told" in refusal


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"global_offset": (1, 0)}, r"at \(1, 0\) of 'k', which is \(4, 6\)"),
        ({"shape": (4, 7)}, "which is"),
        ({"local_strides": (5, 1)}, "rows lie in one another"),
        ({"local_strides": (0, 1)}, "rows lie in one another"),
        ({"local_strides": (1, 1)}, "rows lie in one another"),
        ({"local_offset": 1}, r"ends at element 24 of a tensor of shape \(4, 6\)"),
        ({"local_offset": -1}, "ends at element"),
        ({"local_strides": (7, 1)}, "ends at element 26"),
        ({"global_shape": (2**62, 6)}, "impossibly large"),
    ],
)
def test_pieces_that_can_not_be_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ShardCoordinates(shard(piece(**changed)))
