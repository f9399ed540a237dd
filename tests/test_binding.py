"""`ShardUpdate`: on any layout, tile by tile, the bits are those of the untouched optimizer."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.optimizers import Make, TensorStep, Toy, bits
from tierstore.backends.pinned import PinnedStore
from tierstore.backends.posix import PosixStore
from tierstore.binding import BoundShard, ShardUpdate
from tierstore.config import TierConfig
from tierstore.device import CpuDevice
from tierstore.errors import LayoutError, OptimizerError
from tierstore.layout import Shard, StateLayout
from tierstore.records import Identity, OptimizerLayout
from tierstore.state import RankState
from tierstore.store import TierStore
from tierstore.stream import TileViews
from tierstore.testing.fused_adam import FusedAdam
from tierstore.update import CUT_NUMEL, study

CPU = torch.device("cpu")
STEPS = 4
PADDING = 7.0
# An fp32 weight that is its own main param; all others have a main param of their own.
OWN = "own"
GRAD = "grad"
KINDS = (OWN, "bfloat16", "float16", "float32")

OPTIMIZERS: dict[str, Make] = {
    "adamw": partial(torch.optim.AdamW),
    "adamw-amsgrad": partial(torch.optim.AdamW, amsgrad=True, foreach=True),
    "fused-adam": partial(FusedAdam),
    "sgd": partial(torch.optim.SGD),
}

check = partial(
    settings,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


class Recording(torch.optim.AdamW):
    """Notes the sizes of what it is lent at each step."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.lent: list[list[int]] = []
        self.fail_at: int | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if len(self.lent) == self.fail_at:
            raise FloatingPointError
        self.lent.append([p.numel() for group in self.param_groups for p in group["params"]])
        return super().step(closure)


class RecordingFusedAdam(FusedAdam):
    """The same with the step counter in the group."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.lent: list[list[int]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.lent.append([p.numel() for group in self.param_groups for p in group["params"]])
        super().step(closure)


class Reassigning(Toy):
    """Gives parameters and state new memory instead of changing what they have."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["m"] = torch.zeros_like(param)
        state["m"].data = state["m"] * 0.9 + grad
        param.data = param - state["m"] * 0.1


class TensorRate(Toy):
    """Its learning rate is a tensor of the group, as with ``capturable``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["rate"] = torch.tensor(0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad * group["rate"])


class CountingOperations(TorchDispatchMode):
    """Notes each operation that torch carries out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Shards by size, gap in front, group and kind; and what happens to them in each step."""

    numels: tuple[int, ...]
    gaps: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    n_groups: int = 1
    adjacent_weights: bool = True
    adjacent_grads: bool = True
    align: int = 1
    tile_numel: int = 1024
    chunk_numel: int = 4096
    slots: int = 2
    absent: tuple[frozenset[int], ...] = (frozenset(),) * STEPS
    seed: int = 0

    @property
    def starts(self) -> list[int]:
        starts, end = [], 0
        for numel, gap in zip(self.numels, self.gaps or (0,) * len(self.numels), strict=True):
            start = -(-(end + gap) // self.align) * self.align
            starts.append(start)
            end = start + numel
        return starts


@st.composite
def plans(draw: st.DrawFn, *, align: int = 1) -> Plan:
    count = draw(st.integers(1, 9))
    whole = st.integers(1, 40).map(lambda n: n * CUT_NUMEL)
    n_groups = draw(st.integers(1, 3))

    def each(strategy: st.SearchStrategy[Any]) -> Any:
        return tuple(draw(st.lists(strategy, min_size=count, max_size=count)))

    # Mostly one kind and one group after another: that is where shards merge.
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=2))
    return Plan(
        numels=each(st.integers(1, 9) | whole | st.integers(1, 5000)),
        gaps=each(st.just(0) | st.just(0) | st.integers(1, 200) | st.just(3000)),
        groups=each(st.integers(0, n_groups - 1)),
        kinds=each(st.sampled_from(kinds)),
        n_groups=n_groups,
        adjacent_weights=draw(st.booleans()),
        adjacent_grads=draw(st.booleans()),
        align=align,
        tile_numel=draw(st.sampled_from([1024, 2048])),
        chunk_numel=draw(st.sampled_from([1024, 3000, 4096, 200_000_000])),
        slots=draw(st.integers(1, 3)),
        absent=tuple(
            draw(st.frozensets(st.integers(0, count - 1)) | st.just(frozenset()))
            for _ in range(STEPS)
        ),
        seed=draw(st.integers(0, 2**16)),
    )


class Twins:
    """One optimizer left alone and one whose state is streamed, fed with the same numbers.

    `weights` and `grads`, where given, are the memory of the streamed one.
    """

    def __init__(
        self,
        plan: Plan,
        make: Make,
        *,
        weights: Sequence[torch.Tensor] | None = None,
        grads: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.plan = plan
        self.rng = np.random.default_rng(plan.seed)
        count = len(plan.numels)
        self.kinds = plan.kinds or ("bfloat16",) * count
        groups = plan.groups or (0,) * count
        shards = [
            Shard(name=f"w{index}", numel=numel, array_start=start, local_shape=(numel,))
            for index, (numel, start) in enumerate(zip(plan.numels, plan.starts, strict=True))
        ]
        end = shards[-1].array_start + shards[-1].numel
        self.layout = StateLayout.plan(
            shards, numel=end + 5, tile_numel=plan.tile_numel, chunk_numel=plan.chunk_numel
        )
        # Buffers that shards are slices of, and which elements belong to none of them.
        self.buffers: dict[str, torch.Tensor] = {}
        self.unused: dict[str, torch.Tensor] = {}
        self.weights = list(weights or self._carve(plan.adjacent_weights, self.kinds))
        self.grads = list(grads or self._carve(plan.adjacent_grads, (GRAD,) * count))
        mains = []
        for weight, kind in zip(self.weights, self.kinds, strict=True):
            weight.copy_(self._normal(weight.numel()))
            main = weight.view(-1)
            # Not what the weight says: a main has bits that its weight has not.
            mains.append(main if kind == OWN else main.float() * 1.0001)
        self.alone_mains = [main.clone() for main in mains]
        self.alone_weights = [weight.clone() for weight in self.weights]
        self.alone, self.optimizer = (
            make(
                [
                    {
                        "params": [m for m, g in zip(of, groups, strict=True) if g == group],
                        "lr": 0.01,
                    }
                    for group in range(plan.n_groups)
                ]
            )
            for of in (self.alone_mains, mains)
        )
        self.mains = mains
        self.habit = study(self.optimizer, CPU)
        bound = [
            BoundShard(main=main, weight=weight, weight_is_main=kind == OWN)
            for main, weight, kind in zip(mains, self.weights, self.kinds, strict=True)
        ]
        self.update = ShardUpdate(self.optimizer, self.layout, self.habit, bound)
        self.arrays = ("main", *self.habit.arrays)
        self.steps = 0

    def _carve(self, adjacent: bool, kinds: Sequence[str]) -> Iterator[torch.Tensor]:
        """Tensors for the shards: slices of one buffer for each type, or each on its own."""
        for start, numel, kind in zip(self.plan.starts, self.plan.numels, kinds, strict=True):
            dtype = torch.float32 if kind in (OWN, GRAD) else getattr(torch, kind)
            if not adjacent:
                yield torch.empty(numel, dtype=dtype)
                continue
            name = kind if kind == GRAD else str(dtype)
            if name not in self.buffers:
                self.buffers[name] = torch.full((self.layout.numel,), PADDING, dtype=dtype)
                self.unused[name] = torch.ones(self.layout.numel, dtype=torch.bool)
            self.unused[name][start : start + numel] = False
            yield self.buffers[name][start : start + numel]

    def _normal(self, numel: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.normal(size=numel).astype(np.float32))

    def fill(self, views: TileViews) -> None:
        for extent in self.layout.extents(views.tile.index):
            main = self.mains[extent.shard]
            views.arrays["main"][extent.tile_start :][: extent.numel] = main[extent.shard_start :][
                : extent.numel
            ]

    def let_go(self) -> None:
        """Leave nothing in the mains that an update could take by mistake."""
        for main, kind in zip(self.mains, self.kinds, strict=True):
            if kind != OWN:
                main.data = torch.full((1,), float("nan")).expand(main.shape)

    def prepare(self) -> None:
        """What a trainer does before a step: options from a scheduler, new gradients."""
        for index in range(self.plan.n_groups):
            drawn: dict[str, Any] = {
                "lr": float(self.rng.uniform(1e-3, 0.1)),
                "weight_decay": float(self.rng.uniform(0, 0.1)),
                "betas": (float(self.rng.uniform(0.5, 1)), float(self.rng.uniform(0.9, 1))),
            }
            for optimizer in (self.alone, self.optimizer):
                group = optimizer.param_groups[index]
                group.update({name: drawn[name] for name in drawn if name in group})
        absent = self.plan.absent[self.steps]
        for index, grad in enumerate(self.grads):
            grad.copy_(self._normal(grad.numel()))
            grad[::11] = 0.0
            self.mains[index].grad = None if index in absent else grad
            self.alone_mains[index].grad = None if index in absent else grad.clone()

    def step_alone(self) -> None:
        self.alone.step()
        for weight, main in zip(self.alone_weights, self.alone_mains, strict=True):
            weight.copy_(main)
        self.steps += 1

    def expect_same_bits(self, arrays: dict[str, torch.Tensor]) -> None:
        """Compare all that the two hold, and the memory around it."""
        padding = torch.ones(self.layout.numel, dtype=torch.bool)
        for index, shard in enumerate(self.layout.shards):
            place = slice(shard.array_start, shard.array_start + shard.numel)
            padding[place] = False
            state = self.alone.state[self.alone_mains[index]]
            wanted = {name: state.get(name) for name in self.habit.arrays}
            wanted["main"] = self.alone_mains[index]
            for name, value in wanted.items():
                value = torch.zeros(shard.numel) if value is None else value
                assert bits(value) == bits(arrays[name][place]), f"{name} of shard {index}"
            assert bits(self.alone_weights[index]) == bits(self.weights[index]), f"weight {index}"
            kept = self.optimizer.state[self.mains[index]]
            assert set(kept) == set(self.habit.scalars)
            for name, start in self.habit.scalars.items():
                assert bits(state.get(name, start)) == bits(kept[name]), f"{name} of shard {index}"
            grad = self.alone_mains[index].grad
            assert grad is None or bits(grad) == bits(self.grads[index])
        for array in arrays.values():
            assert not array[padding].any()
        for kind, buffer in self.buffers.items():
            assert bool((buffer[self.unused[kind]] == PADDING).all())
        groups = zip(self.alone.param_groups, self.optimizer.param_groups, strict=True)
        for alone, streamed in groups:
            assert alone.keys() == streamed.keys()
            assert all(alone[name] == streamed[name] for name in alone if name != "params")


class InMemory:
    """The least that drives an update: whole arrays, cut into tiles, visited in any order."""

    def __init__(self, twins: Twins) -> None:
        self.twins, layout = twins, twins.layout
        self.arrays = {name: torch.zeros(layout.numel) for name in twins.arrays}
        for tile in range(layout.n_tiles):
            twins.fill(self.views(tile))
        twins.let_go()

    def views(self, tile: int) -> TileViews:
        grid = self.twins.layout.tile(tile)
        place = slice(grid.start, grid.start + grid.numel)
        return TileViews(grid, {name: whole[place] for name, whole in self.arrays.items()})

    def step(self) -> None:
        self.twins.prepare()
        self.twins.update.begin()
        for tile in self.twins.rng.permutation(self.twins.layout.n_tiles).tolist():
            self.twins.update.visit(self.views(tile))
        self.twins.update.finish()
        self.twins.step_alone()

    def expect_same_bits(self) -> None:
        self.twins.expect_same_bits(self.arrays)


def run_in_memory(twins: Twins, steps: int = STEPS) -> InMemory:
    driver = InMemory(twins)
    for _ in range(steps):
        driver.step()
        driver.expect_same_bits()
    return driver


class OnTier:
    """A chain of updates whose arrays are in a store."""

    def __init__(self, store: TierStore, chain: Sequence[Twins]) -> None:
        self.chain = {f"opt-{index}": twins for index, twins in enumerate(chain)}
        optimizers = [
            OptimizerLayout(
                name=name, layout=twins.layout, arrays=dict.fromkeys(twins.arrays, "float32")
            )
            for name, twins in self.chain.items()
        ]
        self.state = RankState(store, optimizers, self.counters, self.restore)
        self.state.fill({name: twins.fill for name, twins in self.chain.items()})
        for twins in chain:
            twins.let_go()

    def counters(self) -> dict[str, Any]:
        return {name: twins.update.counters() for name, twins in self.chain.items()}

    def restore(self, counters: Mapping[str, Any]) -> None:
        for name, twins in self.chain.items():
            twins.update.restore(counters[name])

    def step(self) -> None:
        for twins in self.chain.values():
            twins.prepare()
        for name, twins in self.chain.items():
            twins.update.begin()
            self.state.advance(name, twins.update.visit, twins.update.finish)
            twins.step_alone()

    def expect_same_bits(self) -> None:
        for name, twins in self.chain.items():
            arrays = {array: torch.full((twins.layout.numel,), torch.nan) for array in twins.arrays}

            def take(views: TileViews, into: dict[str, torch.Tensor] = arrays) -> None:
                for array, whole in into.items():
                    whole[views.tile.start :][: views.tile.numel] = views.arrays[array]

            self.state.look(name, take, range(twins.layout.n_tiles))
            twins.expect_same_bits(arrays)


def run_on_tier(store_class: type[TierStore], directory: Path, chain: Sequence[Twins]) -> None:
    slots = chain[0].plan.slots
    config = TierConfig(
        tier=store_class.tier, directories=(directory,), slots=slots, timeout_s=60.0, io_threads=2
    )
    with store_class(config, CpuDevice(), Identity(nonce="0badcafe")) as store:
        driver = OnTier(store, chain)
        for _ in range(STEPS):
            driver.step()
        driver.expect_same_bits()
        assert store.committed is not None
        assert store.committed.step == STEPS
        assert store.committed.state == driver.counters()
    shutil.rmtree(directory, ignore_errors=True)


# --------------------------------------------------------------------------------- bit for bit


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(plan=plans())
@check(max_examples=50)
def test_same_bits(name: str, plan: Plan) -> None:
    run_in_memory(Twins(plan, OPTIMIZERS[name]))


@pytest.mark.parametrize("store_class", [PinnedStore, PosixStore], ids=["cpu", "nvme"])
@pytest.mark.parametrize("name", ["adamw", "fused-adam"])
@given(plan=plans())
@check(max_examples=10)
def test_same_bits_on_a_tier(
    name: str, store_class: type[TierStore], tmp_path: Path, plan: Plan
) -> None:
    run_on_tier(store_class, tmp_path / "stores", [Twins(plan, OPTIMIZERS[name])])


@pytest.mark.parametrize("store_class", [PinnedStore, PosixStore], ids=["cpu", "nvme"])
def test_same_bits_of_a_chain(store_class: type[TierStore], tmp_path: Path) -> None:
    """Two optimizers of different habits and grids share one window."""
    dense = Plan(numels=(3000, 70, 5000), groups=(0, 1, 0), n_groups=2, kinds=(OWN, OWN, "float16"))
    expert = Plan(numels=(900,) * 7, tile_numel=2048, absent=(frozenset({3}),) * STEPS)
    chain = [Twins(dense, torch.optim.AdamW), Twins(expert, FusedAdam)]
    run_on_tier(store_class, tmp_path / "stores", chain)


def is_cut_badly(plan: Plan) -> bool:
    """Whether a border between tiles lies in a shard, and not 64, 128, ... from its start."""
    return any(
        border % plan.tile_numel == 0 and (border - start) % CUT_NUMEL
        for start, numel in zip(plan.starts, plan.numels, strict=True)
        for border in range(start + 1, start + numel)
    )


@given(plan=plans(align=CUT_NUMEL) | plans())
@check(max_examples=50)
def test_fused_on_the_cpu_is_right_or_refused(plan: Plan) -> None:
    fused = partial(torch.optim.AdamW, fused=True)
    # A small array gets a small tile.
    plan = replace(plan, tile_numel=min(plan.tile_numel, plan.chunk_numel))
    if is_cut_badly(plan):
        with pytest.raises(OptimizerError, match=r"fused=False"):
            Twins(plan, fused)
    else:
        run_in_memory(Twins(plan, fused))


def test_fused_with_unaligned_cuts_says_what_to_do() -> None:
    plan = Plan(numels=(1000, 3000))
    with pytest.raises(OptimizerError, match=r"Adam.*w1 at element 24 .*use fused=False"):
        Twins(plan, partial(torch.optim.Adam, fused=True))
    run_in_memory(Twins(plan, partial(torch.optim.Adam, fused=False)))


def test_a_group_without_any_gradient_advances_as_alone() -> None:
    plan = Plan(
        numels=(100, 100),
        groups=(0, 1),
        n_groups=3,
        absent=(frozenset({0}), frozenset({0, 1}), frozenset({0}), frozenset()),
    )
    twins = Twins(plan, FusedAdam)
    run_in_memory(twins)
    assert [group.get("step") for group in twins.optimizer.param_groups] == [4, 4, None]


@pytest.mark.parametrize("name", ["adamw", "fused-adam"])
def test_a_shard_without_elements_counts_steps(name: str) -> None:
    """A rank may own nothing of a parameter, and its counter moves on all the same."""
    plan = Plan(numels=(100, 0), groups=(0, 1), n_groups=2)
    run_in_memory(Twins(plan, OPTIMIZERS[name]))


@pytest.mark.parametrize("kind", [OWN, "bfloat16"])
def test_an_fp32_weight_is_the_truth_and_its_shadow_follows(kind: str) -> None:
    """What is put into a weight that is its own main param counts; others are overwritten."""
    driver = run_in_memory(Twins(Plan(numels=(1500,), kinds=(kind,)), torch.optim.AdamW), 2)
    driver.twins.weights[0].fill_(0.25)
    if kind == OWN:
        driver.twins.alone_mains[0].fill_(0.25)
    driver.step()
    driver.expect_same_bits()


def test_gradients_with_a_stride() -> None:
    grads = [torch.zeros(2 * 1500)[::2], torch.zeros(2 * 700)[1::2]]
    run_in_memory(Twins(Plan(numels=(1500, 700)), torch.optim.AdamW, grads=grads))


def test_state_that_appears_later_is_not_lost_in_silence() -> None:
    """An option that is changed after `study` can ask for state that has no place on the tier."""
    driver = run_in_memory(Twins(Plan(numels=(1500,)), torch.optim.SGD), 1)
    driver.twins.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(OptimizerError, match="momentum_buffer"):
        driver.step()


def test_a_step_counter_that_is_a_tensor_of_the_group() -> None:
    """It counts steps, not tiles; or the optimizer is refused."""
    try:
        twins = Twins(Plan(numels=(5000,)), TensorStep)
    except OptimizerError:
        return
    run_in_memory(twins)


def test_a_rate_that_is_a_tensor_of_the_group() -> None:
    """It counts as it is at each step, also where a schedule changes it in place."""
    driver = InMemory(Twins(Plan(numels=(5000, 100), groups=(0, 1), n_groups=2), TensorRate))
    for _ in range(STEPS):
        driver.step()
        driver.expect_same_bits()
        for optimizer in (driver.twins.alone, driver.twins.optimizer):
            optimizer.param_groups[0]["rate"].mul_(0.5)


@pytest.mark.parametrize("numels", [(5000,), (300, 400)], ids=["tiles", "one-tile"])
def test_an_optimizer_that_gives_parameters_new_memory(numels: tuple[int, ...]) -> None:
    run_in_memory(Twins(Plan(numels=numels, kinds=("bfloat16",) * len(numels)), Reassigning))
    run_in_memory(Twins(Plan(numels=numels, adjacent_grads=False), Reassigning))


def test_an_error_in_mid_sweep_moves_nothing_on() -> None:
    twins = Twins(Plan(numels=(5000, 100), groups=(0, 1), n_groups=2), Recording)
    driver = run_in_memory(twins, 1)
    optimizer = twins.optimizer
    assert isinstance(optimizer, Recording)
    groups, state = optimizer.param_groups, optimizer.state
    counters = twins.update.counters()
    optimizer.fail_at = len(optimizer.lent) + 2
    with pytest.raises(FloatingPointError):
        driver.step()
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert twins.update.counters() == counters
    assert all(grad is main.grad for grad, main in zip(twins.grads, twins.mains, strict=True))


# ------------------------------------------------------------------------------------- merging


def lent_in_last_step(twins: Twins, steps: int = 1) -> list[list[int]]:
    """Sizes of what the optimizer got, tile by tile, in the last of some steps."""
    driver = run_in_memory(twins, steps - 1)
    optimizer: Any = twins.optimizer
    optimizer.lent.clear()
    driver.step()
    driver.expect_same_bits()
    return list(optimizer.lent)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [Recording, RecordingFusedAdam], ids=["state", "group"])
def test_thousands_of_tiny_shards_are_one(make: Make, kind: str) -> None:
    sizes = np.random.default_rng(0).integers(1, 10, 3000)
    plan = Plan(numels=tuple(sizes.tolist()), kinds=(kind,) * len(sizes), tile_numel=2048)
    lent = lent_in_last_step(Twins(plan, make), 2)
    assert len(lent) == -(-(sum(plan.numels) + 5) // 2048)
    assert [len(sizes) for sizes in lent] == [1] * len(lent)
    assert sum(sum(sizes) for sizes in lent) == sum(plan.numels)


def test_thousands_of_tiny_shards_of_two_groups() -> None:
    """As many runs as there are changes of group."""
    sizes = (3,) * 2000
    groups = tuple(index // 500 % 2 for index in range(2000))
    plan = Plan(numels=sizes, groups=groups, n_groups=2, tile_numel=2048)
    lent = lent_in_last_step(Twins(plan, Recording), 2)
    assert sum(len(sizes) for sizes in lent) == 4 + 2  # and at two borders between tiles


def test_fused_merges_at_multiples_of_64_only() -> None:
    plan = Plan(numels=(128, 64, 100, 28, 64))
    make = partial(Recording, fused=True)
    (lent,) = lent_in_last_step(Twins(plan, make))
    # 192 ends at a multiple; 100 does not, so its neighbour starts anew, and so does the next.
    assert sorted(lent) == [28, 64, 292]


PAIR = Plan(numels=(100, 60))
ONLY_FIRST, ONLY_SECOND, NONE = frozenset({1}), frozenset({0}), frozenset({0, 1})
ALL: frozenset[int] = frozenset()


@pytest.mark.parametrize(
    ("plan", "steps", "expected"),
    [
        pytest.param(PAIR, 1, [160], id="first-step"),
        pytest.param(PAIR, 3, [160], id="later-step"),
        pytest.param(replace(PAIR, absent=(NONE, ALL)), 1, [160], id="no-gradient"),
        pytest.param(replace(PAIR, absent=(NONE, ALL)), 2, [160], id="no-gradient-before"),
        pytest.param(replace(PAIR, absent=(ONLY_FIRST, ONLY_SECOND, ALL)), 3, [160], id="even"),
        pytest.param(replace(PAIR, absent=(ONLY_FIRST, ALL)), 1, [100, 60], id="missing-grad"),
        pytest.param(replace(PAIR, absent=(ONLY_SECOND, ALL)), 2, [100, 60], id="other-step"),
        pytest.param(replace(PAIR, gaps=(0, 1)), 1, [100, 60], id="gap"),
        pytest.param(replace(PAIR, groups=(0, 1), n_groups=2), 1, [100, 60], id="other-group"),
        pytest.param(replace(PAIR, kinds=(OWN, "float32")), 1, [100, 60], id="other-kind"),
        pytest.param(replace(PAIR, kinds=("float16", "bfloat16")), 1, [100, 60], id="other-type"),
        pytest.param(replace(PAIR, adjacent_weights=False), 1, [100, 60], id="weights-apart"),
        pytest.param(replace(PAIR, adjacent_grads=False), 1, [100, 60], id="gradients-apart"),
    ],
)
def test_what_merges(plan: Plan, steps: int, expected: list[int]) -> None:
    assert lent_in_last_step(Twins(plan, Recording), steps) == [expected]


def test_neighbours_in_memory_that_are_none_on_the_tile_do_not_merge() -> None:
    weights = torch.zeros(160, dtype=torch.bfloat16).split(PAIR.numels)
    grads = torch.zeros(160).split(PAIR.numels)
    twins = Twins(replace(PAIR, gaps=(0, 8)), Recording, weights=weights, grads=grads)
    assert lent_in_last_step(twins) == [[100, 60]]


TRIO = Plan(numels=(100, 60, 40))
MIDDLE_MISSES = frozenset({1})


def test_a_gradient_that_is_missing_in_the_middle() -> None:
    """It parts the neighbours, and so does the count that stayed behind in the steps after."""
    plan = replace(TRIO, absent=(MIDDLE_MISSES, ALL))
    for steps in (1, 2):
        assert lent_in_last_step(Twins(plan, Recording), steps) == [[100, 60, 40]]


def test_gradients_of_two_allocations_part_in_the_middle() -> None:
    grads = [*torch.zeros(160).split((100, 60)), *torch.zeros(120).split((40, 80))]
    twins = Twins(Plan(numels=(100, 60, 40, 80)), Recording, grads=grads)
    assert lent_in_last_step(twins) == [[160, 120]]


def test_gradients_in_another_order_do_not_merge() -> None:
    first, second, third = torch.zeros(300).split(100)
    twins = Twins(Plan(numels=(100,) * 3), Recording, grads=[first, third, second])
    assert lent_in_last_step(twins) == [[100, 100, 100]]


def test_a_border_between_tiles_cuts_a_stretch_in_two() -> None:
    """The border is in the second of three shards, or after it."""
    plan = Plan(numels=(700, 700, 300))
    assert sorted(lent_in_last_step(Twins(plan, Recording))) == [[676], [1024]]
    plan = replace(plan, absent=(ONLY_SECOND, frozenset({0, 2})) * 2)
    assert sorted(lent_in_last_step(Twins(plan, Recording), 2)) == [[376, 300], [700, 324]]
    plan = Plan(numels=(700, 324, 300))
    assert sorted(lent_in_last_step(Twins(plan, Recording))) == [[300], [1024]]
    plan = replace(plan, absent=(frozenset({2}),) * STEPS)
    assert sorted(lent_in_last_step(Twins(plan, Recording))) == [[300], [1024]]
    # What the second tile holds is as long as the shard that it starts in.
    plan = Plan(numels=(700, 700, 324))
    assert sorted(lent_in_last_step(Twins(plan, Recording))) == [[700], [1024]]


def test_a_shard_without_elements_parts_nothing() -> None:
    plan = Plan(numels=(0, 100, 0, 0, 60, 0), absent=(frozenset({2}),) * STEPS)
    twins = Twins(plan, Recording)
    # The empty ones are stepped at the end.
    assert lent_in_last_step(twins, 3) == [[160], [0, 0, 0, 0]]


@pytest.mark.parametrize("kind", [OWN, "bfloat16"])
def test_shards_that_merge_cost_no_operation(kind: str) -> None:
    def operations_of_a_visit(numels: tuple[int, ...]) -> list[str]:
        plan = Plan(numels=numels, kinds=(kind,) * len(numels))
        driver = run_in_memory(Twins(plan, torch.optim.AdamW), 2)
        driver.twins.prepare()
        driver.twins.update.begin()
        with CountingOperations() as counting:
            driver.twins.update.visit(driver.views(0))
        # How a stretch is seen that reaches over many shards; that touches no element.
        return [name for name in counting.names if "as_strided" not in name]

    assert operations_of_a_visit((1,) * 1000) == operations_of_a_visit((1000,))


def test_copies_of_many_parts_are_made_together() -> None:
    """To copy scalars and results of 40 parts takes no more operations than those of 20."""

    def copies(count: int) -> int:
        plan = Plan(numels=(10,) * count, adjacent_weights=False, adjacent_grads=False)
        driver = run_in_memory(Twins(plan, torch.optim.AdamW), 2)
        driver.twins.prepare()
        driver.twins.update.begin()
        with CountingOperations() as counting:
            driver.twins.update.visit(driver.views(0))
        names = [name for name in counting.names if "copy" in name or "clone" in name]
        assert sum("stack" in name or "cat" in name for name in counting.names) <= 1
        return len(names)

    assert copies(20) == copies(40)


def test_steps_in_the_group_never_split() -> None:
    plan = replace(PAIR, absent=(ONLY_SECOND, ALL))
    assert lent_in_last_step(Twins(plan, RecordingFusedAdam), 2) == [[160]]


def neighbours(dtypes: Sequence[torch.dtype], numels: Sequence[int]) -> list[torch.Tensor]:
    """Tensors of separate allocations, as far as torch knows, that lie side by side."""
    sizes = [dtype.itemsize * numel for dtype, numel in zip(dtypes, numels, strict=True)]
    memory = bytearray(sum(sizes))
    tensors, start = [], 0
    for dtype, numel, nbytes in zip(dtypes, numels, sizes, strict=True):
        tensors.append(torch.frombuffer(memory, dtype=dtype, count=numel, offset=start))
        start += nbytes
    assert tensors[0].data_ptr() + sizes[0] == tensors[1].data_ptr()
    return tensors


def test_neighbours_of_two_allocations_do_not_merge() -> None:
    weights = neighbours([torch.bfloat16] * 2, PAIR.numels)
    assert lent_in_last_step(Twins(PAIR, Recording, weights=weights)) == [[100, 60]]
    grads = neighbours([torch.float32] * 2, PAIR.numels)
    assert lent_in_last_step(Twins(PAIR, Recording, grads=grads)) == [[100, 60]]


@pytest.mark.parametrize("kinds", [("bfloat16", "float16"), ("float32", "bfloat16")])
def test_neighbours_of_two_types_do_not_merge(kinds: tuple[str, str]) -> None:
    """In one allocation: a buffer of bytes that holds weights of several types."""
    dtypes = [getattr(torch, kind) for kind in kinds]
    border = PAIR.numels[0] * dtypes[0].itemsize
    memory = torch.zeros(border + PAIR.numels[1] * dtypes[1].itemsize, dtype=torch.uint8)
    weights = [memory[:border].view(dtypes[0]), memory[border:].view(dtypes[1])]
    twins = Twins(replace(PAIR, kinds=kinds), Recording, weights=weights)
    assert lent_in_last_step(twins) == [[100, 60]]


# ------------------------------------------------------------------------------------ counters


def test_counters_with_the_step_in_the_state() -> None:
    plan = Plan(
        numels=(10, 10, 5000, 10, 10),
        groups=(0, 1, 0, 0, 1),
        n_groups=2,
        absent=(frozenset({2}), frozenset({2, 3}), ALL, ALL),
    )
    twins = Twins(plan, torch.optim.AdamW)
    assert twins.update.counters() == {"groups": [{}, {}], "scalars": {"step": [[0.0, 5]]}}
    run_in_memory(twins)
    counters = twins.update.counters()
    runs = [[4.0, 2], [2.0, 1], [3.0, 1], [4.0, 1]]
    assert counters == {"groups": [{}, {}], "scalars": {"step": runs}}
    assert json.loads(json.dumps(counters)) == counters


def test_counters_with_the_step_in_the_group() -> None:
    plan = Plan(numels=(10, 10), groups=(0, 2), n_groups=3)
    twins = Twins(plan, FusedAdam)
    assert twins.update.counters() == {"groups": [{}, {}, {}], "scalars": {}}
    run_in_memory(twins)
    counters = twins.update.counters()
    assert counters == {"groups": [{"step": 4}, {}, {"step": 4}], "scalars": {}}
    assert json.loads(json.dumps(counters)) == counters


def test_counters_without_any_counter() -> None:
    twins = Twins(Plan(numels=(10,)), torch.optim.SGD)
    run_in_memory(twins)
    assert twins.update.counters() == {"groups": [{}], "scalars": {}}


@pytest.mark.parametrize("name", ["adamw", "fused-adam"])
def test_counters_are_restored(name: str) -> None:
    plan = Plan(numels=(1500, 700), groups=(0, 1), n_groups=2)
    driver = run_in_memory(Twins(plan, OPTIMIZERS[name]), 2)
    update = driver.twins.update
    saved = json.loads(json.dumps(update.counters()))
    driver.step()
    assert update.counters() != saved
    update.restore(saved)
    assert update.counters() == saved


def set_step(twins: Twins, shard: int, tensor: torch.Tensor) -> None:
    """Let the optimizer alone and the streamed one hold equal, but separate, new step tensors."""
    twins.alone.state[twins.alone_mains[shard]]["step"] = tensor.clone()
    twins.optimizer.state[twins.mains[shard]]["step"] = tensor.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_step_tensor_that_somebody_replaces(dtype: torch.dtype) -> None:
    """It counts in the next step, and keeps its type."""
    driver = run_in_memory(Twins(TRIO, Recording), 2)
    set_step(driver.twins, 1, torch.tensor(7, dtype=dtype))
    assert driver.twins.update.counters()["scalars"]["step"] == [[2.0, 1], [7.0, 1], [2.0, 1]]
    for _ in range(2):
        driver.step()
        driver.expect_same_bits()
    assert isinstance(driver.twins.optimizer, Recording)
    assert driver.twins.optimizer.lent[-1] == [100, 60, 40]
    assert driver.twins.update.counters()["scalars"]["step"] == [[4.0, 1], [9.0, 1], [4.0, 1]]


def test_a_step_tensor_of_another_shape() -> None:
    driver = run_in_memory(Twins(TRIO, torch.optim.AdamW), 1)
    set_step(driver.twins, 2, torch.tensor([3.0]))
    driver.step()
    driver.expect_same_bits()
    assert driver.twins.optimizer.state[driver.twins.mains[2]]["step"].shape == (1,)


def test_replaced_step_tensors_merge_where_they_are_equal() -> None:
    driver = run_in_memory(Twins(TRIO, Recording), 1)
    for shard, step in enumerate((5.0, 1.0, 1.0)):
        set_step(driver.twins, shard, torch.tensor(step))
    driver.step()
    driver.expect_same_bits()
    assert isinstance(driver.twins.optimizer, Recording)
    assert driver.twins.optimizer.lent[-1] == [100, 100]


def test_a_step_tensor_that_somebody_changes_in_place() -> None:
    """That changes one shard's count and no other, as with an optimizer left alone."""
    driver = run_in_memory(Twins(TRIO, Recording), 2)
    twins = driver.twins
    for optimizer, mains in ((twins.alone, twins.alone_mains), (twins.optimizer, twins.mains)):
        optimizer.state[mains[1]]["step"].add_(5)
        # No version counter tells of this one.
        optimizer.state[mains[2]]["step"].data.fill_(9)
    assert twins.update.counters()["scalars"]["step"] == [[2.0, 1], [7.0, 1], [9.0, 1]]
    driver.step()
    driver.expect_same_bits()
    for optimizer, mains in ((twins.alone, twins.alone_mains), (twins.optimizer, twins.mains)):
        for main in mains:
            optimizer.state[main]["step"] += 1
    driver.step()
    driver.expect_same_bits()
    assert twins.update.counters()["scalars"]["step"] == [[5.0, 1], [10.0, 1], [12.0, 1]]


def test_one_step_tensor_that_somebody_puts_in_place_of_all() -> None:
    """As Megatron does at a load: from then on each shard counts for itself again."""
    plan = replace(TRIO, absent=(ALL, MIDDLE_MISSES, ALL, ALL))
    driver = run_in_memory(Twins(plan, torch.optim.AdamW), 1)
    twins = driver.twins
    shared = torch.tensor(4.0)
    for shard, main in enumerate(twins.mains):
        set_step(twins, shard, shared)
        twins.optimizer.state[main]["step"] = shared
    for _ in range(2):
        driver.step()
        driver.expect_same_bits()
    assert twins.update.counters()["scalars"]["step"] == [[6.0, 1], [5.0, 1], [6.0, 1]]
    assert shared == 4


def test_step_tensors_that_somebody_swaps() -> None:
    plan = replace(TRIO, absent=(MIDDLE_MISSES, ALL, ALL, ALL))
    driver = run_in_memory(Twins(plan, torch.optim.AdamW), 2)
    twins = driver.twins
    for optimizer, mains in ((twins.alone, twins.alone_mains), (twins.optimizer, twins.mains)):
        one, other = (optimizer.state[main] for main in mains[:2])
        one["step"], other["step"] = other["step"], one["step"]
    for _ in range(2):
        driver.step()
        driver.expect_same_bits()
    assert twins.update.counters()["scalars"]["step"] == [[3.0, 1], [4.0, 2]]


def test_a_state_dict_is_loaded_again() -> None:
    plan = replace(TRIO, absent=(MIDDLE_MISSES, ALL, ALL, ALL))
    driver = run_in_memory(Twins(plan, torch.optim.AdamW), 2)
    optimizer = driver.twins.optimizer
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        driver.step()
        driver.expect_same_bits()


def test_reset_sets_scalars_to_what_they_are_before_the_first_step() -> None:
    twins = Twins(PAIR, torch.optim.AdamW)
    twins.update.reset()
    start = twins.habit.scalars["step"]
    for main in twins.mains:
        assert bits(twins.optimizer.state[main]["step"]) == bits(start)
    counters = twins.update.counters()
    run_in_memory(twins, 2)
    twins.update.reset()
    assert twins.update.counters() == counters


def test_counters_that_are_kept_elsewhere_are_refused() -> None:
    main = torch.nn.Parameter(torch.randn(64))
    optimizer = torch.optim.AdamW([main], foreach=True)
    layout = StateLayout.plan([Shard(name="w", numel=64, array_start=0, local_shape=(64,))])
    habit = study(optimizer, torch.device("cpu"))
    shard = BoundShard(main=main, weight=main.detach().bfloat16(), weight_is_main=False)
    update = ShardUpdate(optimizer, layout, habit, [shard])
    saved = update.counters()
    update.restore(saved)
    for wrong in (
        {"groups": [{"step": 4}], "scalars": {}},
        {"groups": [{}], "scalars": {"step": [[4.0, 1]], "eta": [[1.0, 1]]}},
        {"groups": [{}, {}], "scalars": saved["scalars"]},
    ):
        with pytest.raises(LayoutError, match="step counters can't be taken over"):
            update.restore(wrong)
    assert update.counters() == saved
