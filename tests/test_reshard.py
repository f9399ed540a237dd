"""State of one random topology, put together for another one, against numpy's own slicing.

A `Job` is made by slicing and joining arrays in which each element is the number of its place in
the model, as a model would do with its tensors. What layouts and pieces say is used by the code
under test alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from tierstore.copies import Copy, SourceId
from tierstore.errors import LayoutError
from tierstore.layout import Piece, Shard, StateLayout
from tierstore.reshard import Plan, plan

Numbers = npt.NDArray[np.int64]
SEEDS = st.integers(0, 2**32 - 1)


# -------------------------------------------------------------------------------- jobs of any shape


@dataclass
class Local:
    """A rank's tensor: the number of each element, and what the model says of it."""

    name: str
    values: Numbers
    pieces: list[Piece]


@dataclass
class Arrays:
    """One optimizer of one rank: number of each element of the array, 0 for padding."""

    layout: StateLayout
    values: Numbers


@dataclass
class Model:
    """Global tensors of numbered elements."""

    rng: np.random.Generator
    tensors: dict[str, Numbers] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    next: int = 1

    def add(self, key: str, kind: str, *shape: int) -> None:
        numel = int(np.prod(shape))
        self.tensors[key] = np.arange(self.next, self.next + numel).reshape(shape)
        self.kinds[key] = kind
        self.next += numel


def make_model(rng: np.random.Generator, *, unlisted: bool = False) -> Model:
    def size(most: int) -> int:
        return 4 * int(rng.integers(1, most + 1))

    model = Model(rng)
    model.add("embedding", "tied", size(30), size(10))
    model.add("row", "row", size(20), int(rng.integers(1, 40)))
    model.add("column", "column", int(rng.integers(1, 60)), size(12))
    model.add("middle", "middle", int(rng.integers(1, 6)), size(4), int(rng.integers(1, 7)))
    model.add("gated", "gated", 2 * size(8), int(rng.integers(1, 30)))
    model.add("norm", "whole", int(rng.integers(1, 90)))
    model.add("scale", "whole")
    model.add("turned", "turned", size(6), int(rng.integers(1, 20)))
    model.add("layers.fc1", "stack", 4, size(6), int(rng.integers(1, 20)))
    model.add("layers.norm", "stack_whole", 4, int(rng.integers(1, 50)))
    model.add("experts.fc1", "experts_gated", 4, int(rng.integers(1, 10)), 2 * size(3))
    model.add("experts.fc2", "experts", 4, size(3), int(rng.integers(1, 10)))
    model.add("experts.each", "experts_each", 4, int(rng.integers(1, 9)), int(rng.integers(1, 9)))
    if unlisted:
        model.add("chunk0.odd", "unlisted", int(rng.integers(1, 90)))
    return model


@dataclass(frozen=True)
class Topology:
    tp: int
    pp: int
    dp: int
    ep: int  # divides dp


def make_topology(rng: np.random.Generator) -> Topology:
    dp = int(rng.choice([1, 2, 3, 4, 6]))
    ep = int(rng.choice([n for n in (1, 2, 4) if dp % n == 0]))
    return Topology(int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 4])), dp, ep)


def block(key: str, whole: Numbers, offset: list[int], local: Numbers, **where: Any) -> Piece:
    """The piece of a local tensor that is one block; leading axes of the global one are added."""
    ahead = whole.ndim - local.ndim
    strides = [stride // local.itemsize for stride in local.strides]
    fields: dict[str, Any] = {
        "key": key,
        "global_shape": whole.shape,
        "global_offset": tuple(offset),
        "shape": (1,) * ahead + local.shape,
        "local_offset": 0,
        "local_strides": (0,) * ahead + tuple(strides),
    }
    return Piece(**fields | where)


def locals_of(model: Model, topology: Topology, stage: int, tp: int) -> Iterator[Local]:
    """The dense tensors of one (pp, tp) place."""
    last = topology.pp - 1
    for key, whole in model.tensors.items():
        kind = model.kinds[key]

        def part(axis: int, whole: Numbers = whole) -> tuple[Numbers, list[int]]:
            length = whole.shape[axis] // topology.tp
            offset = [0] * whole.ndim
            offset[axis] = tp * length
            return np.split(whole, topology.tp, axis)[tp].copy(), offset

        if kind == "tied":
            values, offset = part(0)
            for index, _ in enumerate(sorted({0, last} if topology.pp > 1 else {0, 1})):
                if topology.pp == 1 or stage == (0, last)[index]:
                    name = key if topology.pp > 1 or index == 0 else f"{key}#2"
                    yield Local(name, values, [block(key, whole, offset, values)])
        elif kind in ("stack", "stack_whole"):
            for layer in range(stage * 4 // topology.pp, (stage + 1) * 4 // topology.pp):
                values = whole[layer].copy()
                offset = [layer, 0, 0][: whole.ndim]
                if kind == "stack":
                    values = np.split(values, topology.tp, 0)[tp].copy()
                    offset[1] = tp * values.shape[0]
                yield Local(f"{key}[{layer}]", values, [block(key, whole, offset, values)])
        elif stage != hash_stage(key, topology.pp):
            continue
        elif kind in ("row", "column", "middle"):
            values, offset = part({"row": 0, "column": 1, "middle": 1}[kind])
            yield Local(key, values, [block(key, whole, offset, values)])
        elif kind == "gated":
            half = len(whole) // 2
            length = half // topology.tp
            low, high = tp * length, half + tp * length
            values = np.concatenate([whole[low : low + length], whole[high : high + length]])
            pieces = [
                block(key, whole, [start, 0], values[:length], local_offset=offset)
                for start, offset in ((low, 0), (high, values[:length].size))
            ]
            yield Local(key, values, pieces)
        elif kind == "whole":
            yield Local(key, whole.copy(), [block(key, whole, [0] * whole.ndim, whole)])
        elif kind == "turned":
            values, offset = part(0)
            turned = np.ascontiguousarray(values.T)
            yield Local(key, turned, [block(key, whole, offset, turned.T)])
        elif kind == "unlisted":
            yield Local(key, whole.copy(), [])


def hash_stage(key: str, pp: int) -> int:
    return sum(key.encode()) % pp


def experts_of(model: Model, topology: Topology, stage: int, tp: int, ep: int) -> Iterator[Local]:
    n_local = 4 // topology.ep
    mine = slice(ep * n_local, (ep + 1) * n_local)
    for key, whole in model.tensors.items():
        kind = model.kinds[key]
        if not kind.startswith("experts") or stage != hash_stage(key, topology.pp):
            continue
        if kind == "experts":
            values = np.split(whole[mine], topology.tp, 1)[tp].copy()
            offset = [mine.start, tp * values.shape[1], 0]
            yield Local(key, values, [block(key, whole, offset, values)])
        elif kind == "experts_each":
            values = whole[mine].copy()
            pieces = [
                block(key, whole, [mine.start + n, 0, 0], one, local_offset=n * one.size)
                for n, one in enumerate(values)
            ]
            yield Local(key, values, pieces)
        else:
            # The local tensor is called (rows, experts x columns) and is (experts, rows, columns).
            gate, up = (np.split(side, topology.tp, 2)[tp] for side in np.split(whole[mine], 2, 2))
            values = np.concatenate([gate, up], axis=2)
            length = gate.shape[2]
            pieces = [
                block(key, whole, [mine.start, 0, start], values[:, :, :length], local_offset=lo)
                for start, lo in (
                    (tp * length, 0),
                    (whole.shape[2] // 2 + tp * length, length),
                )
            ]
            yield Local(key, values.reshape(whole.shape[1], -1), pieces)


def cut(rng: np.random.Generator, tensors: list[Local], parts: int) -> Iterator[Arrays]:
    """A buffer of these tensors with padding between them, cut into so many parts anywhere."""
    order = rng.permutation(len(tensors)).tolist()
    buffer: list[int] = []
    places: list[tuple[int, Local]] = []
    for index in order:
        buffer += [0] * int(rng.choice([0, 0, 3, 64]))
        places.append((len(buffer), tensors[index]))
        buffer += tensors[index].values.reshape(-1).tolist()
    buffer += [0] * int(rng.choice([0, 5, 1500]))
    whole = np.array(buffer, np.int64)
    cuts = [0, *sorted(rng.integers(0, len(whole) + 1, parts - 1).tolist()), len(whole)]
    for low, high in pairwise(cuts):
        shards = []
        for start, tensor in places:
            first, stop = max(start, low), min(start + tensor.values.size, high)
            if first < stop:
                shards.append(
                    Shard(
                        name=tensor.name,
                        numel=stop - first,
                        array_start=first - low,
                        param_start=first - start,
                        local_shape=tensor.values.shape,
                        pieces=tuple(tensor.pieces),
                    )
                )
        layout = StateLayout.plan(
            shards,
            numel=high - low,
            tile_numel=int(rng.choice([1024, 2048, 4096])),
            chunk_numel=int(rng.choice([1024, 3072, 8192, 100_000])),
        )
        yield Arrays(layout, whole[low:high].copy())


Job = dict[SourceId, Arrays]


def make_job(model: Model, topology: Topology, rng: np.random.Generator) -> Job:
    """What all ranks hold; dense parameters and experts are two optimizers."""
    job: Job = {}
    for stage in range(topology.pp):
        for tp in range(topology.tp):
            base = (stage * topology.tp + tp) * topology.dp
            dense = list(locals_of(model, topology, stage, tp))
            for index, arrays in enumerate(cut(rng, dense, topology.dp)):
                job[SourceId(base + index, "opt-0")] = arrays
            for ep in range(topology.ep):
                experts = list(experts_of(model, topology, stage, tp, ep))
                for index, arrays in enumerate(cut(rng, experts, topology.dp // topology.ep)):
                    job[SourceId(base + index * topology.ep + ep, "opt-1")] = arrays
    return job


def layouts(job: Job) -> dict[SourceId, StateLayout]:
    return {source: arrays.layout for source, arrays in job.items()}


def filled(found: Plan, job: Job) -> Numbers:
    """The target's array, tile by tile, each from single tiles of the sources."""
    out = np.zeros(found.target.numel, np.int64)
    for tile in found.target.tiles():
        into = out[tile.start : tile.start + tile.numel]
        order = []
        for read in found.reads(tile.index):
            source = job[read.source]
            place = source.layout.tile(read.tile)
            order.append((read.source, read.tile))
            for copy in read.copies:
                copy.apply(source.values[place.start : place.start + place.numel], into)
        assert order == sorted(set(order)), "a tile is read twice, or out of order"
    return out


def filled_at_once(found: Plan, job: Job) -> Numbers:
    out = np.zeros(found.target.numel, np.int64)
    for copy in found.copies:
        copy.apply(job[copy.source].values, out)
    return out


# ------------------------------------------------------------------------------------ every element


@given(SEEDS)
@settings(max_examples=80)
def test_every_element_finds_its_place_on_another_topology(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = make_model(rng)
    saved, wanted = (make_job(model, make_topology(rng), rng) for _ in range(2))
    for target, arrays in wanted.items():
        found = plan(arrays.layout, layouts(saved), rank=target.rank)
        assert (filled(found, saved) == arrays.values).all()
        assert (filled_at_once(found, saved) == arrays.values).all()
        assert sum(copy.numel for copy in found.copies) == (arrays.values > 0).sum()
        assert list(found.copies) == sorted(
            found.copies, key=lambda copy: (copy.source, copy.source_start, copy.target_start)
        )
        assert set(found.sources) == {copy.source for copy in found.copies}


@given(SEEDS)
@settings(max_examples=60)
def test_on_the_same_topology_each_shard_is_one_copy_of_itself(seed: int) -> None:
    rng = np.random.default_rng(seed)
    saved = make_job(make_model(rng, unlisted=True), make_topology(rng), rng)
    for target, arrays in saved.items():
        found = plan(arrays.layout, layouts(saved), rank=target.rank)
        assert (filled(found, saved) == arrays.values).all()
        shards = arrays.layout.shards
        assert len(found.copies) == len(shards)
        for copy in found.copies:
            assert (copy.source, copy.source_shard) == (target, copy.target_shard)
            shard = shards[copy.target_shard]
            assert copy.source_start == copy.target_start == shard.array_start
            assert copy.numel == shard.numel
        assert found.covering() == {index: {(target, index): None} for index in range(len(shards))}


@given(SEEDS)
@settings(max_examples=40)
def test_where_only_dp_changes_every_copy_is_one_run(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model, topology = make_model(rng), make_topology(rng)
    saved = make_job(model, topology, rng)
    wanted = make_job(model, replace(topology, dp=topology.ep * int(rng.integers(1, 4))), rng)
    for target, arrays in wanted.items():
        found = plan(arrays.layout, layouts(saved), rank=target.rank)
        assert (filled(found, saved) == arrays.values).all()
        assert all(len(copy.shape) <= 1 for copy in found.copies)


@given(SEEDS)
@settings(max_examples=60)
def test_there_and_back_is_the_same_to_the_element(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = make_model(rng)
    saved, other = (make_job(model, make_topology(rng), rng) for _ in range(2))
    moved = {
        target: Arrays(
            arrays.layout, filled(plan(arrays.layout, layouts(saved), rank=target.rank), saved)
        )
        for target, arrays in other.items()
    }
    for target, arrays in saved.items():
        back = filled(plan(arrays.layout, layouts(moved), rank=target.rank), moved)
        assert (back == arrays.values).all()


# -------------------------------------------------------------------------------------------- holes


def holes(target: Arrays, saved: Job) -> dict[str, int]:
    """By brute force: how many elements of each shard no source holds."""
    there: set[int] = set()
    for arrays in saved.values():
        there |= set(arrays.values.tolist())
    found = {}
    for shard in target.layout.shards:
        values = target.values[shard.array_start : shard.array_start + shard.numel]
        lacking = sum(value not in there for value in values.tolist())
        if lacking:
            found[shard.name] = lacking
    return found


@given(SEEDS)
@settings(max_examples=60)
def test_without_one_source_its_parameters_are_named_and_counted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = make_model(rng)
    saved, wanted = (make_job(model, make_topology(rng), rng) for _ in range(2))
    lost = list(saved)[int(rng.integers(len(saved)))]
    rest = {source: arrays for source, arrays in saved.items() if source != lost}
    for target, arrays in wanted.items():
        lacking = holes(arrays, rest)
        if not lacking:
            found = plan(arrays.layout, layouts(rest), rank=target.rank)
            assert (filled(found, rest) == arrays.values).all()
            continue
        with pytest.raises(LayoutError) as caught:
            plan(arrays.layout, layouts(rest), rank=target.rank)
        message = str(caught.value)
        named = re.findall(r"(\S+) \(([\d,]+) elements\)", message)
        assert {name: int(numel.replace(",", "")) for name, numel in named} == lacking
        assert f"{sum(lacking.values()):,} elements of {len(lacking)} parameters" in message


def flat(name: str, numel: int, array_start: int = 0, **changed: Any) -> Shard:
    """A shard that is a whole global vector of the same name."""
    fields: dict[str, Any] = {
        "name": name,
        "numel": numel,
        "array_start": array_start,
        "local_shape": (numel,),
        "pieces": (
            Piece(
                key=name,
                global_shape=(numel,),
                global_offset=(0,),
                shape=(numel,),
                local_offset=0,
                local_strides=(1,),
            ),
        ),
    }
    return Shard(**fields | changed)


def test_many_missing_parameters_are_counted_and_twenty_named() -> None:
    target = StateLayout.plan([flat(f"p{n}", 10, 10 * n) for n in range(33)])
    with pytest.raises(LayoutError, match=r"330 elements of 33 .* and 13 more") as caught:
        plan(target, {})
    assert len(re.findall(r"p\d+ ", str(caught.value))) == 20


def test_elements_that_belong_to_no_piece_are_missing_and_never_zero() -> None:
    (piece,) = flat("p", 10).pieces
    half = flat("p", 10, pieces=(replace(piece, shape=(7,)),))
    saved = {SourceId(0, "opt-0"): StateLayout.plan([flat("p", 10)])}
    with pytest.raises(LayoutError, match=r"p \(3 elements\)"):
        plan(StateLayout.plan([half]), saved)


def test_pieces_that_overlap_can_not_hide_a_hole() -> None:
    (piece,) = flat("p", 10).pieces
    twice = flat("p", 10, pieces=(replace(piece, shape=(5,)), replace(piece, shape=(5,))))
    saved = {SourceId(0, "opt-0"): StateLayout.plan([flat("p", 10)])}
    with pytest.raises(LayoutError, match="share elements"):
        plan(StateLayout.plan([twice]), saved)


def test_another_global_shape_names_both() -> None:
    saved = {SourceId(3, "opt-1"): StateLayout.plan([flat("p", 10)])}
    with pytest.raises(LayoutError, match=r"p is \(12,\) here and \(10,\) in rank 3 opt-1"):
        plan(StateLayout.plan([flat("p", 12)]), saved)
    other = StateLayout.plan([flat("p", 10), flat("q", 12, 10)])
    (piece,) = other.shards[1].pieces
    mixed = replace(other.shards[1], pieces=(replace(piece, key="p"),))
    with pytest.raises(LayoutError, match=r"p is \(10,\) here and \(12,\) in here"):
        plan(StateLayout.plan([other.shards[0], mixed]), saved)


def test_shapes_of_what_nobody_wants_do_not_matter() -> None:
    saved = {
        SourceId(n, "opt-0"): StateLayout.plan([flat("p", 10), flat("q", 10 + n, 10)])
        for n in range(2)
    }
    assert len(plan(StateLayout.plan([flat("p", 10)]), saved).copies) == 1


# ----------------------------------------------------------------------------------------- replicas


def test_of_replicas_that_of_the_same_rank_is_taken_then_that_of_the_same_name() -> None:
    saved = {
        SourceId(rank, "opt-0"): StateLayout.plan(
            [flat("p", 10), replace(flat("p", 10, 10), name="p#2")]
        )
        for rank in (2, 0, 1)
    }
    target = StateLayout.plan([flat("p", 10), replace(flat("p", 10, 10), name="p#2")])

    def origins(rank: int | None) -> list[tuple[int, int]]:
        return [
            (copy.source.rank, copy.source_start) for copy in plan(target, saved, rank=rank).copies
        ]

    assert origins(1) == [(1, 0), (1, 10)]
    assert origins(2) == [(2, 0), (2, 10)]
    assert origins(9) == origins(None) == [(0, 0), (0, 10)]


@given(SEEDS)
@settings(max_examples=150)
def test_sources_that_overlap_in_part_give_each_element_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    whole = np.arange(1, rows * columns + 1).reshape(rows, columns)
    saved: Job = {}
    for rank in range(6):
        low = rng.integers(0, whole.shape)
        high = rng.integers(low, whole.shape) + 1
        values = whole[low[0] : high[0], low[1] : high[1]].copy()
        piece = block("p", whole, low.tolist(), values)
        start = int(rng.integers(values.size))
        numel = int(rng.integers(1, values.size - start + 1))
        shard = flat("p", numel, local_shape=values.shape, param_start=start, pieces=(piece,))
        saved[SourceId(rank, "opt-0")] = Arrays(
            StateLayout.plan([shard]), values.reshape(-1)[start : start + numel]
        )
    saved[SourceId(9, "opt-0")] = Arrays(
        StateLayout.plan(
            [
                flat(
                    "p",
                    whole.size,
                    local_shape=whole.shape,
                    pieces=(block("p", whole, [0, 0], whole),),
                )
            ]
        ),
        whole.reshape(-1),
    )
    turned = whole.T.copy()
    shard = flat("p", whole.size, local_shape=turned.shape)
    target = StateLayout.plan([replace(shard, pieces=(block("p", whole, [0, 0], turned.T),))])
    for rank in (0, 5, 9):
        found = plan(target, layouts(saved), rank=rank)
        assert (filled(found, saved) == turned.reshape(-1)).all()
        assert sum(copy.numel for copy in found.copies) == whole.size
        own = sum(copy.numel for copy in found.copies if copy.source.rank == rank)
        assert own == saved[SourceId(rank, "opt-0")].values.size


def rows_of(whole: Numbers, first: int, stop: int, start: int, numel: int) -> Arrays:
    """A flat range of some whole rows."""
    values = whole[first:stop].copy()
    piece = block("p", whole, [first, 0], values)
    shard = flat("p", numel, local_shape=values.shape, param_start=start, pieces=(piece,))
    return Arrays(StateLayout.plan([shard]), values.reshape(-1)[start : start + numel])


def test_regions_that_lie_side_by_side_in_both_arrays_are_one_run() -> None:
    whole = np.arange(1, 141).reshape(20, 7)
    saved = {
        SourceId(rank, "opt-0"): rows_of(whole, *where)
        for rank, where in enumerate([(0, 12, 0, 31), (0, 12, 31, 53), (12, 20, 0, 56)])
    }
    target = rows_of(whole, 0, 20, 3, 130)
    found = plan(target.layout, layouts(saved))
    assert (filled(found, saved) == target.values).all()
    assert [copy.shape for copy in found.copies] == [(28,), (53,), (49,)]


def test_a_part_of_the_same_tensor_is_completed_by_others() -> None:
    whole = np.arange(1, 141).reshape(20, 7)
    saved = {
        SourceId(rank, "opt-0"): rows_of(whole, *where)
        for rank, where in enumerate([(0, 20, 0, 40), (0, 10, 0, 70), (10, 20, 0, 70)])
    }
    target = rows_of(whole, 0, 20, 0, 140)
    found = plan(target.layout, layouts(saved), rank=0)
    assert (filled(found, saved) == target.values).all()
    assert {copy.source.rank: copy.numel for copy in found.copies}.keys() == {0, 1, 2}
    assert sum(copy.numel for copy in found.copies if copy.source.rank == 0) == 40


# ----------------------------------------------------------------------------------- without pieces


def test_unlisted_shards_match_by_name_shape_and_range_alone() -> None:
    def unlisted(**changed: Any) -> StateLayout:
        return StateLayout.plan([replace(flat("odd", 10, 5, pieces=()), **changed)])

    saved = {SourceId(1, "opt-0"): unlisted()}
    (copy,) = plan(unlisted(), saved, rank=1).copies
    assert (copy.source_start, copy.target_start, copy.shape) == (5, 5, (10,))
    assert len(plan(unlisted(), saved, rank=7).copies) == 1
    for other in (
        unlisted(name="even"),
        unlisted(numel=9),
        unlisted(local_shape=(5, 2)),
        unlisted(numel=5, param_start=5),
    ):
        with pytest.raises(LayoutError, match="only on the topology that saved it"):
            plan(other, saved, rank=1)
    with pytest.raises(LayoutError, match=r"odd \(10 elements\)"):
        plan(unlisted(), saved, rank=1, by_name=False)
    with pytest.raises(LayoutError, match=r"odd \(10 elements\)"):
        plan(unlisted(), {SourceId(1, "opt-0"): StateLayout.plan([flat("odd", 10)])}, rank=1)


def test_an_unlisted_shard_of_several_other_ranks_is_refused() -> None:
    layout = StateLayout.plan([flat("odd", 10, pieces=())])
    saved = {SourceId(rank, "opt-0"): layout for rank in range(3)}
    (copy,) = plan(layout, saved, rank=2).copies
    assert copy.source.rank == 2
    with pytest.raises(LayoutError, match="several ranks saved one"):
        plan(layout, saved, rank=3)


# -------------------------------------------------------------------------------------------- sizes


def columns(rows: int, width: int, tp: int, parts: int) -> dict[SourceId, StateLayout]:
    """A matrix split by columns over `tp`, each flat part over `parts` ranks."""
    local = (rows, width // tp)
    numel = rows * width // tp
    found = {}
    for t in range(tp):
        piece = Piece(
            key="embedding",
            global_shape=(rows, width),
            global_offset=(0, t * local[1]),
            shape=local,
            local_offset=0,
            local_strides=(local[1], 1),
        )
        for p in range(parts):
            low, high = p * numel // parts, (p + 1) * numel // parts
            shard = Shard(
                name="embedding",
                numel=high - low,
                array_start=0,
                param_start=low,
                local_shape=local,
                pieces=(piece,),
            )
            found[SourceId(t * parts + p, "opt-0")] = StateLayout.plan([shard])
    return found


def test_two_billion_elements_split_by_columns_are_a_few_copies() -> None:
    rows, width = 250_000, 8192
    saved = columns(rows, width, 4, 3)
    wanted = columns(rows, width, 2, 5)
    total = 0
    for target, layout in wanted.items():
        found = plan(layout, saved, rank=target.rank)
        total += sum(copy.numel for copy in found.copies)
        assert len(found.copies) <= 2 * 5 * 3
        # One tile: 1024 rows of 4096, out of each of two sources' 2048 columns.
        reads = list(found.reads(layout.n_tiles // 2))
        assert len(reads) <= 6
        assert sum(len(read.copies) for read in reads) <= 24
    assert total == rows * width


def test_a_thousand_sources_of_one_tensor_cost_a_few_copies_each() -> None:
    (layout,) = columns(40_000, 1000, 1, 1).values()
    found = plan(layout, columns(40_000, 1000, 8, 128))
    assert len(found.copies) <= 3 * 1024
    assert sum(copy.numel for copy in found.copies) == 40_000_000


# ------------------------------------------------------------------------------------------- copies


def copy_of(**changed: Any) -> Copy:
    fields: dict[str, Any] = {
        "source": SourceId(0, "opt-0"),
        "source_shard": 0,
        "target_shard": 0,
        "source_start": 1,
        "target_start": 2,
        "shape": (2, 3),
        "source_strides": (4, 1),
        "target_strides": (3, 1),
    }
    return Copy(**fields | changed)


def test_a_copy_never_reaches_beyond_its_arrays() -> None:
    source, target = np.arange(8), np.zeros(8, np.int64)
    copy_of().apply(source, target)
    assert target.tolist() == [0, 0, 1, 2, 3, 5, 6, 7]
    for wrong in (
        copy_of(source_start=2),
        copy_of(target_start=3),
        copy_of(source_start=-1),
        copy_of(target_start=-1),
    ):
        with pytest.raises(LayoutError, match="of an array of shape"):
            wrong.apply(source, target)
    with pytest.raises(LayoutError, match="of an array of shape"):
        copy_of().apply(np.arange(16)[::2], target)
    with pytest.raises(LayoutError, match="int64 do not go to float32"):
        copy_of().apply(source, np.zeros(8, np.float32))


def test_the_parts_of_a_copy_are_those_of_a_range() -> None:
    copy = copy_of(source_strides=(1, 2), target_strides=(3, 1))  # turned
    pairs = [
        (copy.source_start + i + 2 * j, copy.target_start + 3 * i + j)
        for i in range(2)
        for j in range(3)
    ]
    for low in range(10):
        for high in range(low, 10):
            for parts, side in ((copy.of_source, 0), (copy.of_target, 1)):
                found = [
                    (
                        part.source_start
                        + sum(map(np.prod, zip(i, part.source_strides, strict=True))),
                        part.target_start
                        + sum(map(np.prod, zip(i, part.target_strides, strict=True))),
                    )
                    for part in parts(low, high)
                    for i in product(*map(range, part.shape))
                ]
                assert sorted(found) == sorted(p for p in pairs if low <= p[side] < high)
