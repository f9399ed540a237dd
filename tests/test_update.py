"""`study` finds out right how an optimizer behaves or refuses it; `lend` leaves no trace."""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.optimizers import (
    ADAM,
    EITHER,
    NEEDS_ALL_GRADIENTS,
    REFUSED,
    STUDIED,
    Make,
    TensorStep,
    Toy,
    bits,
    make_groups,
    parameters,
)
from tierstore.errors import OptimizerError
from tierstore.testing.fused_adam import FusedAdam
from tierstore.update import CUT_NUMEL, GroupCopies, Habit, Run, lend, study

CPU = torch.device("cpu")
STEPS = 4
WITH_MOMENTUM = ["sgd-fused-momentum", "sgd-momentum", "sgd-momentum-foreach", "sgd-nesterov"]


def set_options(optimizer: torch.optim.Optimizer, step: int) -> None:
    """What a scheduler does between steps."""
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = group["lr"] * (1 - 0.1 * step)
        if "weight_decay" in group:
            group["weight_decay"] = 0.01 * step * (index + 1)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


class Streamed:
    """An optimizer whose arrays lie elsewhere, stepped in random tiles in any order."""

    def __init__(self, optimizer: torch.optim.Optimizer, habit: Habit, seed: int) -> None:
        self.optimizer, self.habit = optimizer, habit
        self.rng = np.random.default_rng(seed)
        # Some optimizers make their state when they are made.
        optimizer.state.clear()
        self.arrays = {}
        for param in parameters(optimizer):
            self.arrays[param] = {name: torch.zeros_like(param) for name in habit.arrays}
            optimizer.state[param] = {n: value.clone() for n, value in habit.scalars.items()}

    def cut(self) -> list[tuple[int, torch.Tensor, slice]]:
        parts = []
        for index, group in enumerate(self.optimizer.param_groups):
            for param in group["params"]:
                most = param.numel() // self.habit.cut_numel
                inner = self.habit.cut_numel * self.rng.integers(0, most + 1, 4)
                cuts = sorted({0, param.numel(), *inner.tolist()})
                parts += [(index, param, slice(*ends)) for ends in pairwise(cuts)]
        return parts

    def step(self) -> None:
        parts = self.cut()
        scalars: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        options: dict[int, dict[str, Any]] = {}
        for tile in np.array_split(self.rng.permutation(len(parts)), max(1, len(parts) // 3)):
            mine = [parts[place] for place in tile]
            runs = []
            for index, param, place in mine:
                state = {name: array[place] for name, array in self.arrays[param].items()}
                state |= {n: value.clone() for n, value in self.optimizer.state[param].items()}
                grad = None if param.grad is None else param.grad[place]
                runs.append(Run(index, param[place], grad, state))
            with lend(self.optimizer, runs) as loan:
                loan.step()
            for (index, param, place), run in zip(mine, runs, strict=True):
                for name, array in self.arrays[param].items():
                    array[place] = run.state[name]
                scalars[param] = {name: run.state[name] for name in self.habit.scalars}
                options[index] = {n: v for n, v in loan.groups[index].items() if n != "params"}
        for param, kept in scalars.items():
            self.optimizer.state[param] = dict(kept)
        for index, kept in options.items():
            self.optimizer.param_groups[index].update(kept)


def expect_same_bits(make: Make, habit: Habit, seed: int, *, gaps: bool = True) -> None:
    """Compare a few steps of an untouched optimizer with the same ones tile by tile."""
    untouched = make(make_groups(np.random.default_rng(seed)))
    streamed = Streamed(make(make_groups(np.random.default_rng(seed))), habit, seed)
    rng = np.random.default_rng(seed + 100)
    pairs = list(zip(parameters(untouched), parameters(streamed.optimizer), strict=True))
    for step in range(STEPS):
        for index, (param, twin) in enumerate(pairs):
            grad = torch.from_numpy(rng.normal(size=param.numel()).astype(np.float32))
            grad[::7] = 0.0
            absent = gaps and (index + step) % 4 == 3
            param.grad, twin.grad = (None, None) if absent else (grad, grad.clone())
        untouched.step()
        streamed.step()
        for group, other in zip(
            untouched.param_groups, streamed.optimizer.param_groups, strict=True
        ):
            options = [
                {name: value for name, value in of.items() if name != "params"}
                for of in (group, other)
            ]
            assert options[0] == options[1]
        for index, (param, twin) in enumerate(pairs):
            where = f"step {step}, parameter {index}"
            assert bits(param) == bits(twin), where
            state = untouched.state[param]
            for name, array in streamed.arrays[twin].items():
                wanted = state.get(name)
                wanted = torch.zeros_like(array) if wanted is None else wanted
                assert bits(wanted) == bits(array), f"{where}, {name}"
            for name in habit.scalars:
                wanted = state.get(name, habit.scalars[name])
                assert bits(wanted) == bits(streamed.optimizer.state[twin][name]), (
                    f"{where}, {name}"
                )
            if param.grad is not None and twin.grad is not None:
                assert bits(param.grad) == bits(twin.grad), where
        for optimizer in (untouched, streamed.optimizer):
            set_options(optimizer, step)


def describe(value: Any) -> Any:
    """What a value is made of, down to the identity of objects and the bits of tensors."""
    if isinstance(value, torch.Tensor):
        return id(value), str(value.dtype), tuple(value.shape), bits(value)
    if isinstance(value, dict):
        return id(value), [(describe(key), describe(entry)) for key, entry in value.items()]
    if isinstance(value, list | tuple):
        return id(value), [describe(entry) for entry in value]
    return id(value) if callable(value) else repr(value)


def traces(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All of an optimizer that a study or a loan could leave a trace in."""
    # torch's own note that the devices of the parameters were looked at.
    own = {n: v for n, v in vars(optimizer).items() if n != "_need_device_dtype_check_for_fused"}
    return [
        [(name, describe(value)) for name, value in own.items()],
        [describe(param.grad) for param in parameters(optimizer)],
        [param.requires_grad for param in parameters(optimizer)],
        bits(torch.get_rng_state()),
    ]


def add_gradients(optimizer: torch.optim.Optimizer) -> None:
    for param in parameters(optimizer):
        param.grad = torch.full_like(param, 0.5)


# --------------------------------------------------------------------------------------- study


@pytest.mark.parametrize("name", STUDIED)
def test_study_finds_what_is_right(name: str) -> None:
    make, arrays, scalars, cut_numel = STUDIED[name]
    habit = study(make(make_groups(np.random.default_rng(0))), CPU)
    assert (habit.arrays, tuple(habit.scalars), habit.cut_numel) == (arrays, scalars, cut_numel)
    assert not any(value.any() for value in habit.scalars.values())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", STUDIED)
def test_tiles_give_the_same_bits(name: str, seed: int) -> None:
    make = STUDIED[name][0]
    expect_same_bits(make, study(make(make_groups(np.random.default_rng(0))), CPU), seed)


@pytest.mark.parametrize("name", EITHER)
def test_right_or_refused(name: str) -> None:
    make = EITHER[name]
    try:
        habit = study(make(make_groups(np.random.default_rng(0))), CPU)
    except OptimizerError:
        return
    for seed in (0, 1):
        expect_same_bits(make, habit, seed, gaps=name not in NEEDS_ALL_GRADIENTS)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    optimizer = REFUSED[name](make_groups(np.random.default_rng(0)))
    with pytest.raises(OptimizerError, match=type(optimizer).__name__):
        study(optimizer, CPU)


@pytest.mark.parametrize("name", STUDIED)
def test_study_leaves_no_trace(name: str) -> None:
    """Neither before the first step nor later, with state and gradients."""
    optimizer = STUDIED[name][0](make_groups(np.random.default_rng(0)))
    for _ in range(2):
        before = traces(optimizer)
        study(optimizer, CPU)
        assert traces(optimizer) == before
        add_gradients(optimizer)
        optimizer.step()


@pytest.mark.parametrize("name", [*EITHER, *REFUSED])
def test_a_refusal_leaves_no_trace(name: str) -> None:
    optimizer = (EITHER | REFUSED)[name](make_groups(np.random.default_rng(0)))
    add_gradients(optimizer)
    before = traces(optimizer)
    with contextlib.suppress(Exception):  # which one is the business of the tests above
        study(optimizer, CPU)
    assert traces(optimizer) == before


class ReassigningNeighbours(Toy):
    """Not elementwise, and shows it in new memory only."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.data = param - (grad + grad.roll(1)) * 0.1


def test_study_looks_where_the_optimizer_puts_its_results() -> None:
    with pytest.raises(OptimizerError, match="not elementwise"):
        study(ReassigningNeighbours(make_groups(np.random.default_rng(0))), CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_study_does_not_care_about_the_default_type(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        habit = study(torch.optim.AdamW([torch.zeros(3, dtype=torch.float32)]), CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    assert habit.arrays == ADAM


def test_study_does_not_care_about_the_default_device() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(3)])
    with torch.device("meta"):
        habit = study(optimizer, CPU)
    assert habit.arrays == ADAM
    assert habit.scalars["step"].device == CPU


def test_study_of_an_optimizer_that_owns_nothing_here() -> None:
    """A rank may have a group without parameters."""
    habit = study(torch.optim.AdamW([{"params": []}, {"params": []}]), CPU)
    assert (habit.arrays, tuple(habit.scalars)) == (ADAM, ("step",))


def test_a_schedule_that_starts_at_zero() -> None:
    make = partial(torch.optim.AdamW, lr=0.0, fused=True)
    habit = study(make(make_groups(np.random.default_rng(0))), CPU)
    assert habit.cut_numel == CUT_NUMEL


@pytest.mark.parametrize("name", [*STUDIED, *WITH_MOMENTUM])
def test_signs_of_zeros(name: str) -> None:
    """-0.0 and 0.0 are not the same bits: a start from zeros must not lose the sign."""
    make = (EITHER | {name: entry[0] for name, entry in STUDIED.items()})[name]

    def make_groups_of_two() -> list[dict[str, Any]]:
        return [{"params": [torch.tensor([-0.0, 1.0])]}, {"params": [torch.tensor([-0.0, 1.0])]}]

    try:
        habit = study(make(make_groups_of_two()), CPU)
    except OptimizerError:
        return
    untouched = make(make_groups_of_two())
    streamed = Streamed(make(make_groups_of_two()), habit, 0)
    for optimizer in (untouched, streamed.optimizer):
        for param in parameters(optimizer):
            param.grad = torch.tensor([-0.0, -0.0])
    untouched.step()
    streamed.step()
    for param, twin in zip(parameters(untouched), parameters(streamed.optimizer), strict=True):
        assert bits(param) == bits(twin)
        for array, found in streamed.arrays[twin].items():
            assert bits(untouched.state[param].get(array, torch.zeros(2))) == bits(found), array


# ---------------------------------------------------------------------------------------- lend


def make_lent() -> tuple[torch.optim.Optimizer, list[Run]]:
    """An optimizer that has stepped once, and something for each of its groups to lend."""
    optimizer = FusedAdam(make_groups(np.random.default_rng(0)))
    add_gradients(optimizer)
    optimizer.step()
    runs = [
        Run(index, torch.ones(4), torch.full((4,), 2.0), {n: torch.zeros(4) for n in ADAM})
        for index in (0, 1, 1)
    ]
    return optimizer, runs


def test_a_loan_leaves_no_trace() -> None:
    optimizer, runs = make_lent()
    before = traces(optimizer)
    with lend(optimizer, runs) as loan:
        loan.step()
        assert [len(group["params"]) for group in loan.groups] == [1, 2]
        assert [group["step"] for group in loan.groups] == [2, 2]
    assert traces(optimizer) == before
    assert all(run.main.grad is None for run in runs)
    assert all(bool((run.main != 1).all()) and run.state["exp_avg"].all() for run in runs)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_loan_leaves_no_trace_after_an_error(kind: type[BaseException]) -> None:
    optimizer, runs = make_lent()
    before = traces(optimizer)

    def fail_within() -> None:
        with lend(optimizer, runs) as loan:
            loan.step()
            loan.groups[0]["lr"] = 3.0
            raise kind

    with pytest.raises(kind):
        fail_within()
    assert traces(optimizer) == before
    assert all(run.main.grad is None for run in runs)


def test_a_loan_that_fails_to_start_leaves_no_trace() -> None:
    optimizer, runs = make_lent()
    runs[-1].grad = torch.zeros(5)
    before = traces(optimizer)
    with pytest.raises(RuntimeError, match="gradient of size"), lend(optimizer, runs):
        pass
    assert traces(optimizer) == before


def test_what_changes_in_lent_groups_does_not_leak() -> None:
    optimizer, runs = make_lent()
    options = [dict(group) for group in optimizer.param_groups]
    with lend(optimizer, runs) as loan:
        for group in optimizer.param_groups:
            group["lr"], group["new"] = 7.0, "new"
            del group["eps"]
        assert [group["lr"] for group in loan.groups] == [7.0, 7.0]
    assert optimizer.param_groups == options


def test_options_are_those_of_the_moment() -> None:
    optimizer, runs = make_lent()
    optimizer.param_groups[1]["lr"] = 0.0
    with lend(optimizer, runs) as loan:
        loan.step()
    assert bool((runs[0].main != 1).all())
    assert bool((runs[1].main == 1).all())


def test_loans_share_copies_of_what_no_loan_changes() -> None:
    """A learning rate is copied once, a counter for each loan that follows a change."""
    optimizer = TensorStep(make_groups(np.random.default_rng(0)))
    lr, step = torch.tensor(0.1), torch.tensor(3)
    optimizer.param_groups[0] |= {"lr": lr, "step": step}
    copies, seen = GroupCopies(), []
    for _ in range(3):
        with lend(optimizer, [Run(0, torch.ones(4), torch.ones(4), {})], copies) as loan:
            assert loan.groups[0]["step"] == 3
            loan.step()
            assert loan.changes() == {0: {"step": torch.tensor(4)}}
            seen.append((loan.groups[0]["lr"], loan.groups[0]["step"]))
    assert len({id(copy) for copy, _ in seen}) == 1
    assert len({id(copy) for _, copy in seen}) == 3
    assert seen[0][0] is not lr
    assert (float(lr), int(step)) == (float(torch.tensor(0.1)), 3)


def test_a_loan_of_nothing() -> None:
    """A tile of nothing but padding: no group has a parameter, none moves on."""
    optimizer, _ = make_lent()
    before = traces(optimizer)
    with lend(optimizer, []) as loan:
        loan.step()
        assert [group["step"] for group in loan.groups] == [1, 1]
    assert traces(optimizer) == before


def test_without_state_the_optimizer_makes_its_own() -> None:
    optimizer, runs = make_lent()
    runs[0].state = {}
    with lend(optimizer, runs) as loan:
        loan.step()
        assert set(optimizer.state[runs[0].main]) == set(ADAM)
        assert optimizer.state[runs[1].main] is runs[1].state


def test_hooks_are_for_steps_and_not_for_tiles() -> None:
    optimizer, runs = make_lent()
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    with lend(optimizer, runs) as loan:
        loan.step()
    study(optimizer, CPU)
    assert calls == []
    optimizer.step()
    assert calls == ["before", "after"]


def test_hooks_on_all_optimizers_are_for_steps_too() -> None:
    optimizer, runs = make_lent()
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    try:
        with lend(optimizer, runs) as loan:
            loan.step()
        study(optimizer, CPU)
        assert calls == []
        optimizer.step()
        assert calls == ["before", "after"]
    finally:
        for handle in handles:
            handle.remove()


def test_what_stands_in_for_step_is_not_called() -> None:
    """A scheduler wraps the instance's ``step``, and an adapter replaces it."""
    optimizer, runs = make_lent()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step = None  # type: ignore[assignment, method-assign]
    with lend(optimizer, runs) as loan:
        loan.step()
    assert bool((runs[0].main != 1).all())
