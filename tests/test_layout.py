"""Which element lies where: every element once, every wrong layout refused."""

from __future__ import annotations

import copy
import json
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings

from tierstore.errors import LayoutError
from tierstore.layout import (
    DEFAULT_TILE_NUMEL,
    MAX_CHUNK_NUMEL,
    TILE_NUMEL_MULTIPLE,
    Extent,
    Piece,
    Shard,
    StateLayout,
)

# Elements of the smallest type, one byte, in one 4096-byte block.
BLOCK_NUMEL = 4096


def make_shards(sizes: Sequence[tuple[int, int]]) -> list[Shard]:
    """Shards from (gap in front, numel), each the middle of its parameter."""
    shards, end = [], 0
    for index, (gap, numel) in enumerate(sizes):
        start = end + gap
        shards.append(
            Shard(
                name=f"p{index}",
                numel=numel,
                array_start=start,
                param_start=index % 5,
                local_shape=(index % 5 + numel + index % 3,),
            )
        )
        end = start + numel
    return shards


def one_shard(**changed: Any) -> Shard:
    fields: dict[str, Any] = {"name": "p", "numel": 10, "array_start": 0, "local_shape": (10,)}
    return Shard(**fields | changed)


# Most shards are tiny, some span several tiles, some are empty; gaps are padding.
SIZES = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(0, 63), st.integers(0, 3000)),
        st.one_of(st.sampled_from([0, 1, 1023, 1024, 1025]), st.integers(0, 9000)),
    ),
    max_size=12,
)


@st.composite
def layouts(draw: st.DrawFn) -> StateLayout:
    shards = make_shards(draw(SIZES))
    end = max((shard.array_start + shard.numel for shard in shards), default=0)
    return StateLayout.plan(
        draw(st.permutations(shards)),
        numel=draw(st.one_of(st.none(), st.integers(end, end + 3000))),
        chunk_numel=draw(st.integers(1024, 20_000)),
        tile_numel=draw(st.integers(1024, 8192)),
    )


def owners(layout: StateLayout) -> npt.NDArray[np.int64]:
    """By brute force: who owns each element of the array, and which of its elements it is."""
    found = np.full((layout.numel, 2), -1)
    for index, shard in enumerate(layout.shards):
        for element in range(shard.numel):
            found[shard.array_start + element] = index, element
    return found


def owners_by_extents(layout: StateLayout) -> npt.NDArray[np.int64]:
    """The same from the extents; an element in two extents is an error."""
    found = np.full((layout.numel, 2), -1)
    for tile in layout.tiles():
        for extent in layout.extents(tile.index):
            run = found[tile.start + extent.tile_start :][: extent.numel]
            assert len(run) == extent.numel
            assert (run == -1).all()
            run[:, 0] = extent.shard
            run[:, 1] = np.arange(extent.shard_start, extent.shard_start + extent.numel)
    return found


# ----------------------------------------------------------------------------------------- coverage


@given(layouts())
@settings(max_examples=80)
def test_extents_cover_every_element_of_every_shard_once(layout: StateLayout) -> None:
    assert (owners_by_extents(layout) == owners(layout)).all()


@given(layouts())
def test_extents_lie_within_their_tile_and_shard_in_order(layout: StateLayout) -> None:
    for tile in layout.tiles():
        end = 0
        for extent in layout.extents(tile.index):
            assert extent.numel >= 1
            assert end <= extent.tile_start
            end = extent.tile_start + extent.numel
            assert extent.shard_start >= 0
            assert extent.shard_start + extent.numel <= layout.shards[extent.shard].numel
        assert end <= tile.numel


@given(layouts())
def test_tiles_of_a_shard_are_those_with_extents_of_it(layout: StateLayout) -> None:
    held: dict[int, list[int]] = {index: [] for index in range(len(layout.shards))}
    for tile in range(layout.n_tiles):
        for extent in layout.extents(tile):
            held[extent.shard].append(tile)
    assert {index: list(layout.tiles_of(index)) for index in held} == held


@given(layouts())
def test_tiles_partition_the_array(layout: StateLayout) -> None:
    tiles = list(layout.tiles())
    assert [tile.index for tile in tiles] == list(range(layout.n_tiles))
    assert [tile.start for tile in tiles] == list(range(0, layout.numel, layout.tile_numel))
    assert sum(tile.numel for tile in tiles) == layout.numel
    assert all(tile.numel == layout.tile_numel for tile in tiles[:-1])
    assert all(1 <= tile.numel <= layout.tile_numel for tile in tiles[-1:])


@given(layouts())
def test_chunks_are_filled_with_tiles_one_after_the_other(layout: StateLayout) -> None:
    # By brute force: cut the array into chunks, and each chunk into tiles.
    places = [
        (chunk, place, start)
        for chunk, chunk_start in enumerate(range(0, layout.numel, layout.chunk_numel))
        for place, start in enumerate(
            range(
                chunk_start,
                min(chunk_start + layout.chunk_numel, layout.numel),
                layout.tile_numel,
            )
        )
    ]
    assert [(tile.chunk, tile.place, tile.start) for tile in layout.tiles()] == places
    assert layout.n_chunks == len({chunk for chunk, _, _ in places})
    for chunk in range(layout.n_chunks):
        held = sum(of == chunk for of, _, _ in places)
        assert layout.tiles_in_chunk(chunk) == held <= layout.tiles_per_chunk


@given(layouts())
def test_no_such_tile(layout: StateLayout) -> None:
    for index in (-1, layout.n_tiles, layout.n_tiles + 1):
        with pytest.raises(LayoutError, match=f"tile {index} "):
            layout.tile(index)
        with pytest.raises(LayoutError):
            layout.extents(index)


# -------------------------------------------------------------------------------- shapes of layouts


def test_shard_larger_than_a_chunk_is_split() -> None:
    layout = StateLayout.plan(make_shards([(0, 10_000)]), chunk_numel=2048, tile_numel=1024)
    assert (layout.n_chunks, layout.n_tiles, layout.tiles_per_chunk) == (5, 10, 2)
    assert layout.tiles_of(0) == range(10)
    assert layout.extents(3) == (Extent(0, 0, 3 * 1024, 1024),)
    assert layout.extents(9) == (Extent(0, 0, 9 * 1024, 10_000 - 9 * 1024),)


def test_empty_shards_have_no_extent() -> None:
    layout = StateLayout.plan(make_shards([(0, 0), (0, 5), (0, 0), (0, 0), (7, 5), (0, 0)]))
    assert [extent.shard for extent in layout.extents(0)] == [1, 4]
    assert [len(layout.tiles_of(index)) for index in range(6)] == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("last", [0, 5])
def test_empty_shards_at_the_border_of_a_tile(last: int) -> None:
    sizes = [(0, 0), (0, 1024), (0, 0), (0, 0), (0, 1024), (0, 0), (0, last)]
    layout = StateLayout.plan(make_shards(sizes), numel=2048 + 5, tile_numel=1024)
    assert [[e.shard for e in layout.extents(tile)] for tile in range(3)] == [
        [1],
        [4],
        [6] if last else [],
    ]
    # In front of the shard that starts where they are, whatever the order they were given in.
    again = StateLayout.plan(layout.shards[::-1], numel=2048 + 5, tile_numel=1024)
    assert [len(layout.tiles_of(i)) for i in range(7)] == [len(again.tiles_of(i)) for i in range(7)]
    assert (owners_by_extents(again) == owners(again)).all()


def test_one_element_shards() -> None:
    layout = StateLayout.plan(make_shards([(0, 1)] * 1500), tile_numel=1024)
    assert [len(layout.extents(tile)) for tile in range(2)] == [1024, 476]
    assert layout.extents(1)[0] == Extent(1024, 0, 0, 1)


def test_a_single_element() -> None:
    layout = StateLayout.plan([one_shard(numel=1)])
    assert (layout.numel, layout.n_tiles, layout.n_chunks) == (1, 1, 1)
    assert layout.extents(0) == (Extent(0, 0, 0, 1),)


def test_padding_belongs_to_no_extent() -> None:
    layout = StateLayout.plan(make_shards([(100, 10), (5000, 10)]), numel=9000, tile_numel=1024)
    assert layout.extents(0) == (Extent(0, 100, 0, 10),)
    assert [len(layout.extents(tile)) for tile in range(layout.n_tiles)] == [1, 0, 0, 0, 1] + [
        0
    ] * 4


def test_a_hundred_thousand_tiny_shards() -> None:
    # Time that grows with the square of the number of shards would be minutes.
    started = time.process_time()
    layout = StateLayout.plan(make_shards([(i % 3, 1 + i % 7) for i in range(100_000)]))
    cut = StateLayout.plan(layout.shards, chunk_numel=65536, tile_numel=1024)
    for each in (layout, cut):
        covered = np.zeros(100_000, dtype=np.int64)
        for tile in range(each.n_tiles):
            for extent in each.extents(tile):
                covered[extent.shard] += extent.numel
        assert (covered == [shard.numel for shard in each.shards]).all()
    assert StateLayout.from_json(cut.to_json()) == cut
    assert time.process_time() - started < 30


def test_an_empty_array() -> None:
    for layout in (StateLayout.plan([]), StateLayout.plan(make_shards([(0, 0), (0, 0)]))):
        assert (layout.numel, layout.n_tiles, layout.n_chunks) == (0, 0, 0)
        assert list(layout.tiles()) == []
        assert layout.chunk_numel == layout.tile_numel <= BLOCK_NUMEL
        assert StateLayout.from_json(layout.to_json()) == layout
        with pytest.raises(LayoutError, match="0 tiles"):
            layout.extents(0)


# --------------------------------------------------------------------------------------------- plan


def test_default_grid_of_a_large_array() -> None:
    assert (DEFAULT_TILE_NUMEL, MAX_CHUNK_NUMEL) == (4 * 2**20, 200_000_000)
    numel = 10**10
    layout = StateLayout.plan([one_shard(numel=numel, local_shape=(10**5, 10**5))])
    assert (layout.tile_numel, layout.tiles_per_chunk) == (4 * 2**20, 47)
    assert layout.chunk_numel == 197_132_288
    assert layout.n_chunks == 51
    last = layout.tile(layout.n_tiles - 1)
    assert (last.chunk, last.place) == divmod(layout.n_tiles - 1, 47)
    assert last.start + last.numel == numel
    assert layout.extents(last.index) == (Extent(0, 0, last.start, last.numel),)


@given(
    numel=st.one_of(st.integers(0, 100_000), st.integers(0, 10**12)),
    chunk_numel=st.one_of(st.integers(1024, 100_000), st.integers(1024, 10**10)),
    tile_numel=st.one_of(st.integers(1024, 100_000), st.integers(1024, MAX_CHUNK_NUMEL)),
)
@example(numel=10**12, chunk_numel=10**10, tile_numel=MAX_CHUNK_NUMEL)
@example(numel=MAX_CHUNK_NUMEL + 1, chunk_numel=MAX_CHUNK_NUMEL, tile_numel=MAX_CHUNK_NUMEL)
def test_plan_stays_within_what_was_asked_for(
    numel: int, chunk_numel: int, tile_numel: int
) -> None:
    layout = StateLayout.plan([], numel=numel, chunk_numel=chunk_numel, tile_numel=tile_numel)
    assert layout.chunk_numel <= min(chunk_numel, MAX_CHUNK_NUMEL)
    assert layout.tile_numel <= min(tile_numel, layout.chunk_numel)
    assert layout.tile_numel % TILE_NUMEL_MULTIPLE == layout.chunk_numel % layout.tile_numel == 0
    # Never a sparse giant: beyond the end lies less than a tile, or less than a block of the
    # smallest type where one tile holds all.
    assert layout.chunk_numel < numel + layout.tile_numel or numel == 0
    assert layout.tile_numel < max(numel, 1) + BLOCK_NUMEL


@pytest.mark.parametrize("numel", [1, 1024, 1025, 10_000, 4 * 2**20 - 1])
def test_small_arrays_get_small_tiles_and_chunks(numel: int) -> None:
    layout = StateLayout.plan([], numel=numel)
    assert (layout.n_tiles, layout.n_chunks) == (1, 1)
    assert layout.chunk_numel == layout.tile_numel < numel + BLOCK_NUMEL


@pytest.mark.parametrize(
    ("numel", "chunk_numel"),
    [
        (4 * 2**20, 4 * 2**20),
        (4 * 2**20 + 1, 8 * 2**20),
        (197_132_288, 197_132_288),
        (MAX_CHUNK_NUMEL, 197_132_288),
    ],
)
def test_arrays_of_a_few_tiles_get_chunks_of_a_few_tiles(numel: int, chunk_numel: int) -> None:
    layout = StateLayout.plan([], numel=numel)
    assert (layout.tile_numel, layout.chunk_numel) == (DEFAULT_TILE_NUMEL, chunk_numel)


@pytest.mark.parametrize(
    ("chunk_numel", "tile_numel", "planned"),
    [
        (3000, 10_000, (2048, 2048)),  # a chunk smaller than a tile cuts the tile down
        (2048, 4096, (2048, 2048)),
        (1024, DEFAULT_TILE_NUMEL, (1024, 1024)),
        (10_000, 3000, (8192, 2048)),
        (2**40, 4096, (106_496, 4096)),
        (2**40, 2**40, (106_496, 106_496)),
    ],
)
def test_chunks_are_whole_tiles(
    chunk_numel: int, tile_numel: int, planned: tuple[int, int]
) -> None:
    layout = StateLayout.plan([], numel=106_000, chunk_numel=chunk_numel, tile_numel=tile_numel)
    assert (layout.chunk_numel, layout.tile_numel) == planned


def test_a_tile_larger_than_any_chunk_is_cut_down() -> None:
    layout = StateLayout.plan([], numel=10**9, chunk_numel=10**9, tile_numel=10**9)
    assert layout.chunk_numel == layout.tile_numel <= MAX_CHUNK_NUMEL


@given(SIZES)
def test_plan_does_not_depend_on_the_order_of_the_shards(sizes: list[tuple[int, int]]) -> None:
    shards = [shard for shard in make_shards(sizes) if shard.numel]
    assert StateLayout.plan(shards[::-1]) == StateLayout.plan(shards)


@pytest.mark.parametrize(
    "asked", [{"chunk_numel": 1023}, {"tile_numel": 1023}, {"tile_numel": 0}, {"chunk_numel": -1}]
)
def test_plan_refuses_less_than_a_block(asked: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match="least of either is 1024"):
        StateLayout.plan([], **asked)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([one_shard(), one_shard(array_start=9)], "before the shard in front of it ends"),
        ([one_shard(), one_shard(array_start=0)], "before the shard in front of it ends"),
        ([one_shard(), one_shard(array_start=4, numel=0)], "before the shard in front of it ends"),
        ([one_shard(array_start=-1)], "starts at element -1"),
        ([one_shard(numel=-1)], "negative"),
        ([one_shard(param_start=-1)], "negative"),
        ([one_shard(array_start=91)], "end at element 101 of an array of 100"),
        ([one_shard(param_start=1)], "covers elements 1 to 11 of a tensor"),
        ([one_shard(local_shape=(3, 3))], "covers elements 0 to 10 of a tensor"),
        ([one_shard(local_shape=(10, 0))], "covers elements 0 to 10 of a tensor"),
        ([one_shard(local_shape=())], "covers elements 0 to 10 of a tensor"),
    ],
)
def test_shards_that_do_not_fit_are_refused(shards: list[Shard], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        StateLayout.plan(shards, numel=100)
    with pytest.raises(LayoutError, match=message):
        StateLayout(numel=100, chunk_numel=1024, tile_numel=1024, shards=tuple(shards))


def test_shards_out_of_order_are_refused() -> None:
    shards = (one_shard(array_start=10), one_shard(array_start=0))
    with pytest.raises(LayoutError, match="before the shard in front of it ends"):
        StateLayout(numel=100, chunk_numel=1024, tile_numel=1024, shards=shards)


@pytest.mark.parametrize(
    ("numel", "chunk_numel", "tile_numel", "message"),
    [
        (100, 1024, 0, "tile_numel 0"),
        (100, 1024, -1024, "tile_numel -1024"),
        (100, 1024, 1000, "tile_numel 1000"),
        (100, 0, 1024, "chunk_numel 0"),
        (100, -1024, 1024, "chunk_numel -1024"),
        (100, 1536, 1024, "chunk_numel 1536"),
        (100, 200_000_512, 1024, "chunk_numel 200000512"),
        (100, 2048, 4096, "chunk_numel 2048"),
        (-1, 1024, 1024, "array of -1"),
    ],
)
def test_grids_that_do_not_divide_are_refused(
    numel: int, chunk_numel: int, tile_numel: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        StateLayout(numel=numel, chunk_numel=chunk_numel, tile_numel=tile_numel, shards=())


# --------------------------------------------------------------------------------------------- JSON


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    rank = draw(st.integers(0, 3))

    def axes(most: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(0, most), min_size=rank, max_size=rank)))

    return Piece(
        key=draw(st.text(max_size=5)),
        global_shape=axes(2**70),
        global_offset=axes(9),
        shape=axes(9),
        local_offset=draw(st.integers(0, 9)),
        local_strides=axes(9),
    )


@st.composite
def described_layouts(draw: st.DrawFn) -> StateLayout:
    """Layouts whose shards have names, shapes and pieces of all sorts."""
    shards = [
        Shard(
            name=f"{draw(st.text(max_size=5))}.{index}",
            numel=shard.numel,
            array_start=shard.array_start,
            param_start=shard.param_start,
            local_shape=(*shard.local_shape, draw(st.integers(1, 3))),
            weight_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
            pieces=tuple(draw(st.lists(pieces(), max_size=2))),
        )
        for index, shard in enumerate(make_shards(draw(SIZES)[:4]))
    ]
    return StateLayout.plan(shards, tile_numel=draw(st.sampled_from([1024, 2048])))


@given(described_layouts())
def test_json_round_trip(layout: StateLayout) -> None:
    text = json.dumps(layout.to_json(), allow_nan=False)
    again = StateLayout.from_json(json.loads(text))
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.to_json() == layout.to_json()
    assert again.fingerprint() == layout.fingerprint()


# So few that two are often equal.
FEW_LAYOUTS = st.builds(
    lambda sizes, numel: StateLayout.plan(make_shards(sizes), numel=numel),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), max_size=2),
    st.sampled_from([10, 2000]),
)


@given(FEW_LAYOUTS, FEW_LAYOUTS)
@settings(max_examples=300)
def test_fingerprints_are_equal_for_equal_layouts_only(a: StateLayout, b: StateLayout) -> None:
    assert (a.fingerprint() == b.fingerprint()) == (a == b)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every key and index in a JSON value."""
    if isinstance(value, dict):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return []
    return [
        found for key, child in items for found in [(*path, key), *paths_in(child, (*path, key))]
    ]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a path."""
    if not path:
        return new
    changed = copy.deepcopy(value)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = new
    return changed


def value_at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def dotted(value: Any) -> str | None:
    """A path as the id of a test."""
    return ".".join(map(str, value)) or "whole" if isinstance(value, tuple) else None


def removed(value: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    changed = copy.deepcopy(value)
    parent: Any = changed
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    return changed


EXAMPLE = StateLayout.plan(
    [
        Shard(
            name="decoder.weight",
            numel=900,
            array_start=64,
            param_start=100,
            local_shape=(50, 20),
            weight_dtype="bfloat16",
            pieces=(
                Piece(
                    key="weight",
                    global_shape=(4, 100, 20),
                    global_offset=(1, 50, 0),
                    shape=(1, 50, 20),
                    local_offset=0,
                    local_strides=(1000, 20, 1),
                ),
            ),
        ),
        Shard(name="decoder.bias", numel=3000, array_start=1024, local_shape=(3000,)),
    ],
    chunk_numel=2048,
    tile_numel=1024,
).to_json()

PATHS = paths_in(EXAMPLE)


def test_every_field_is_in_the_fingerprint() -> None:
    original = StateLayout.from_json(EXAMPLE)
    changes = {
        "numel": 4100,
        "chunk_numel": 4096,
        "tile_numel": 2048,
        "shards.0.name": "other",
        "shards.0.numel": 899,
        "shards.0.array_start": 65,
        "shards.0.param_start": 99,
        "shards.0.local_shape": [20, 50],
        "shards.0.weight_dtype": "float32",
        "shards.0.pieces": [],
        "shards.0.pieces.0.key": "other",
        "shards.0.pieces.0.global_shape": [5, 100, 20],
        "shards.0.pieces.0.global_offset": [2, 50, 0],
        "shards.0.pieces.0.shape": [1, 20, 50],
        "shards.0.pieces.0.local_offset": 1,
        "shards.0.pieces.0.local_strides": [1000, 1, 20],
    }
    layouts = {original.fingerprint(): original}
    for path, new in changes.items():
        keys = tuple(int(key) if key.isdigit() else key for key in path.split("."))
        changed = StateLayout.from_json(replaced(EXAMPLE, keys, new))
        assert changed != original, path
        layouts[changed.fingerprint()] = changed
    assert len(layouts) == len(changes) + 1


@pytest.mark.parametrize(
    "path",
    [path for path in PATHS if isinstance(path[-1], str)],
    ids=dotted,
)
def test_json_without_a_key_is_refused(path: tuple[Any, ...]) -> None:
    with pytest.raises(LayoutError, match="not a layout"):
        StateLayout.from_json(removed(EXAMPLE, path))


NUMBERS = [path for path in PATHS if isinstance(value_at(EXAMPLE, path), int)]
TEXTS = [path for path in PATHS if isinstance(value_at(EXAMPLE, path), str)]
LISTS = [path for path in PATHS if isinstance(value_at(EXAMPLE, path), list)]
OBJECTS = [path for path in PATHS if isinstance(value_at(EXAMPLE, path), dict)]


def layout_or_refusal(value: Any) -> StateLayout | None:
    """The layout, or None for a `LayoutError`; whatever else is raised is a failure."""
    try:
        return StateLayout.from_json(value)
    except LayoutError:
        return None


def accepted(paths: list[tuple[Any, ...]], wrong: Any) -> list[str | None]:
    """Where in a layout a value is taken that should be refused."""
    return [
        dotted(path)
        for path in paths
        if layout_or_refusal(replaced(EXAMPLE, path, wrong)) is not None
    ]


@pytest.mark.parametrize("wrong", [True, False, -1, 1024.0, "1024", None, [1024], {"1": 2}])
def test_only_whole_numbers_are_sizes(wrong: Any) -> None:
    assert accepted(NUMBERS, wrong) == []


@pytest.mark.parametrize("wrong", [None, 7, True, 1.5, "", "text", {}, {"0": 1}])
def test_only_lists_are_lists(wrong: Any) -> None:
    assert accepted(LISTS, wrong) == []


@pytest.mark.parametrize("wrong", [None, 7, True, 1.5, ["text"], {"text": 1}])
def test_only_texts_are_names(wrong: Any) -> None:
    assert accepted(TEXTS, wrong) == []


@pytest.mark.parametrize("wrong", [None, 7, True, 1.5, "", "text", [], ["numel"]])
def test_only_objects_are_objects(wrong: Any) -> None:
    assert accepted([(), *OBJECTS], wrong) == []


KEYS = sorted({path[-1] for path in PATHS if isinstance(path[-1], str)})
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 5000)
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=8)
    ),
    max_leaves=20,
)


@given(JSON)
@settings(max_examples=200)
def test_any_json_is_a_layout_or_refused(value: Any) -> None:
    layout_or_refusal(value)


@given(
    st.fixed_dictionaries(
        {
            "numel": st.integers(-1, 10_000),
            "chunk_numel": st.sampled_from([0, 1024, 2048, 3072, 2**70]),
            "tile_numel": st.sampled_from([0, 1, 1024, 2048, 2**70]),
            "shards": st.lists(
                st.fixed_dictionaries(
                    {
                        "name": st.text(max_size=3),
                        "numel": st.integers(0, 3000),
                        "array_start": st.integers(0, 5000),
                        "param_start": st.integers(0, 10),
                        "local_shape": st.lists(st.integers(0, 3000), max_size=2),
                        "weight_dtype": st.text(max_size=3),
                        "pieces": st.just([]),
                    }
                ),
                max_size=3,
            ),
        }
    )
)
@settings(max_examples=200)
def test_sizes_of_any_kind_are_a_layout_or_refused(value: dict[str, Any]) -> None:
    layout = layout_or_refusal(value)
    if layout is not None:
        assert layout.to_json() == value
        assert (owners_by_extents(layout) == owners(layout)).all()


@given(path=st.sampled_from([(), *PATHS]), new=JSON)
@settings(max_examples=400)
def test_one_wrong_value_is_refused_or_kept_as_it_is(path: tuple[Any, ...], new: Any) -> None:
    damaged = replaced(EXAMPLE, path, new)
    layout = layout_or_refusal(damaged)
    if layout is not None:
        # Keys that a layout does not have are passed over; all others come back unchanged.
        assert contains(damaged, layout.to_json())


def contains(value: Any, part: Any) -> bool:
    """Whether a JSON value is `part`, apart from more keys in its objects."""
    if isinstance(part, dict):
        return isinstance(value, dict) and all(
            key in value and contains(value[key], child) for key, child in part.items()
        )
    if isinstance(part, list):
        return (
            isinstance(value, list)
            and len(value) == len(part)
            and all(contains(*pair) for pair in zip(value, part, strict=True))
        )
    return type(value) is type(part) and bool(value == part)


@pytest.mark.parametrize("path", [("numel",), ("shards", 0, "name")], ids=dotted)
def test_deeply_nested_json_is_refused(path: tuple[Any, ...]) -> None:
    # Python 3.12 and newer parse text that is nested deeper than a message can show.
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with_deep = replaced(EXAMPLE, path, deep)
    with pytest.raises(LayoutError):
        StateLayout.from_json(with_deep)


def test_huge_numbers_cost_nothing() -> None:
    big = 10**30
    shard = EXAMPLE["shards"][1] | {"numel": big, "array_start": 0, "local_shape": [big, big]}
    value = {"numel": big, "chunk_numel": 1024, "tile_numel": 1024, "shards": [shard]}
    tracemalloc.start()
    try:
        layout = StateLayout.from_json(value)
        assert layout.n_tiles == -(-big // 1024)
        assert layout.extents(layout.n_tiles - 1) == (Extent(0, 0, big - 1024, 1024),)
        assert StateLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
        with pytest.raises(LayoutError):
            StateLayout.from_json(value | {"tile_numel": big})
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 2**20
