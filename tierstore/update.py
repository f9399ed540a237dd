"""The update is the user's own optimizer: its groups and state are lent to the views of one tile.

`study` finds out by trying, once, how an optimizer behaves: which state it keeps for each element,
where its step counter lives, and whether a parameter may be cut anywhere without changing a bit.
`lend` then runs the optimizer's own ``step`` on any tensors that stand in for parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierstore.errors import OptimizerError

if TYPE_CHECKING:
    import torch

__all__ = ["CUT_NUMEL", "GroupCopies", "Habit", "Loan", "Run", "lend", "step_hooks", "study"]

CUT_NUMEL = 64
"""Cuts at multiples of this many elements suit every vector width that torch's kernels use."""

_STUDY_NUMEL = 1000
_STUDY_STEPS = 3
_WHOLE = (_STUDY_NUMEL,)
_ODD_CUTS = (1, 7, 92, 333, 566, 1)
_EVEN_CUTS = (64, 128, 384, 424)


@dataclass(frozen=True, kw_only=True)
class Habit:
    """How an optimizer keeps its state.

    Parameters
    ----------
    arrays
        State tensors of one element per parameter element (``exp_avg``, ...), in order.
    scalars
        State tensors of one element per parameter (``step``), as they are before the first step.
    cut_numel
        A parameter may be cut at multiples of this many elements: 1 or 64.
    """

    arrays: tuple[str, ...]
    scalars: dict[str, torch.Tensor]
    cut_numel: int


@dataclass(slots=True)
class Run:
    """A flat stretch of one group that is updated as if it were a parameter.

    Parameters
    ----------
    group
        Index of the param group.
    main
        fp32 parameter values, changed in place.
    grad
        Gradient of the same length, or None: the optimizer then skips the run.
    state
        Per-element and scalar state tensors, changed in place; empty for the optimizer to make.
    """

    group: int
    main: torch.Tensor
    grad: torch.Tensor | None
    state: dict[str, torch.Tensor]


@dataclass(slots=True)
class Loan:
    """An optimizer that works on other tensors for a while.

    Parameters
    ----------
    optimizer
        The user's.
    groups
        Copies of its groups that hold the runs.
    runs
        What it works on. After a step their ``state`` is what the optimizer then holds.
    """

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]]
    runs: Sequence[Run]
    _before: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self._before = [dict(group) for group in self.groups]

    def step(self) -> None:
        """The class's own step, without hooks, whatever stands in for it on the instance."""
        step = type(self.optimizer).step
        # torch wraps the step of every optimizer class in one that calls the hooks.
        getattr(step, "__wrapped__", step)(self.optimizer)
        for run in self.runs:
            run.state = self.optimizer.state[run.main]

    def changes(self) -> dict[int, dict[str, Any]]:
        """What steps have changed in groups that hold a run (an Apex step counter), by group."""
        return {
            index: {
                name: value
                for name, value in group.items()
                if name != "params" and (value is not before.get(name) or _changed_in_place(value))
            }
            for index, (group, before) in enumerate(zip(self.groups, self._before, strict=True))
            if group["params"]
        }


class GroupCopies:
    """Copies of the tensors in an optimizer's groups (a learning rate), for one loan after another.

    Each loan finds the optimizer's own values: a copy that a loan has changed (a step counter)
    gives way to a new one, and any other serves again. The optimizer's own must stay as they are
    as long as the copies are in use.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], torch.Tensor] = {}

    def of(self, index: int, group: dict[str, Any]) -> dict[str, Any]:
        """A copy of the group with this index, its tensors copies as well."""
        return {
            name: self._copy((index, name), value) if _is_tensor(value) else value
            for name, value in group.items()
        }

    def _copy(self, key: tuple[int, str], value: torch.Tensor) -> torch.Tensor:
        if key not in self._made or _changed_in_place(self._made[key]):
            self._made[key] = value.clone()
        return self._made[key]


@contextmanager
def lend(
    optimizer: torch.optim.Optimizer, runs: Sequence[Run], copies: GroupCopies | None = None
) -> Iterator[Loan]:
    """Let the optimizer own these runs instead of its parameters, while the block lasts.

    Hyper-parameters are those of the live groups, as they are now; their tensors are taken from
    `copies`, if given.
    """
    copies = GroupCopies() if copies is None else copies
    own = optimizer.param_groups, optimizer.state
    groups = [
        copies.of(index, group) | {"params": list[Any]()} for index, group in enumerate(own[0])
    ]
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    try:
        for run in runs:
            run.main.grad = run.grad
            groups[run.group]["params"].append(run.main)
            state[run.main] = run.state
        optimizer.param_groups, optimizer.state = groups, state
        yield Loan(optimizer, groups, runs)
    finally:
        for run in runs:
            run.main.grad = None
        optimizer.param_groups, optimizer.state = own


def _changed_in_place(value: Any) -> bool:
    # A tensor counts the changes in place; a copy starts at 0.
    return _is_tensor(value) and value._version > 0


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage")


@contextmanager
def step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Run the hooks that torch runs around a step; loans run none, since a tile is no step."""
    from torch.optim import optimizer as registry

    call: Any
    for call in (
        *registry._global_optimizer_pre_hooks.values(),
        *optimizer._optimizer_step_pre_hooks.values(),
    ):
        call(optimizer, (), {})
    yield
    for call in (
        *optimizer._optimizer_step_post_hooks.values(),
        *registry._global_optimizer_post_hooks.values(),
    ):
        call(optimizer, (), {})


def study(optimizer: torch.optim.Optimizer, device: torch.device) -> Habit:
    """Find out how an optimizer behaves by a few steps on small random tensors.

    The optimizer's parameters, state, groups and attributes and torch's random state are as
    before when this returns or raises.

    Parameters
    ----------
    optimizer
        Any ``torch.optim.Optimizer``.
    device
        Where the update will run.

    Raises
    ------
    OptimizerError
        The update is not elementwise, or its state does not start as zeros, so that the result
        would differ when it is applied tile by tile; or the trial itself failed.
    """
    import torch

    name = type(optimizer).__name__
    devices = [device] if device.type == "cuda" else []
    attributes = dict(vars(optimizer))
    try:
        # A default device or type that the user has set is for the user's tensors.
        with torch.device("cpu"), torch.random.fork_rng(devices), torch.no_grad():
            return _study(_Trial(optimizer, device), name)
    except OptimizerError:
        raise
    except Exception as error:
        raise OptimizerError(
            f"{name} can't be tried out on flat fp32 tensors with gradients, so its state can't be "
            f"streamed ({type(error).__name__}: {error})"
        ) from error
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)


def _study(trial: _Trial, name: str) -> Habit:
    whole = trial.run(_WHOLE)
    habit = _habit(whole.states[0], name)
    for state in whole.states[1:]:
        other = _habit(state, name)
        if (habit.arrays, habit.scalars.keys()) != (other.arrays, other.scalars.keys()):
            raise OptimizerError(
                f"{name} keeps other state in one param group ({', '.join(other.arrays)}) than in "
                f"another ({', '.join(habit.arrays)}); all arrays must cover all groups"
            )
    if not whole.equals(trial.run(_WHOLE, habit)):
        raise OptimizerError(
            f"the state of {name} does not start as zeros, so it can't be laid out before the "
            "first step"
        )
    if whole.equals(trial.run(_ODD_CUTS, habit)):
        return habit
    if whole.equals(trial.run(_EVEN_CUTS, habit)):
        return Habit(arrays=habit.arrays, scalars=habit.scalars, cut_numel=CUT_NUMEL)
    raise OptimizerError(
        f"{name} gives another result when parameters are cut and updated one after the other: it "
        "is not elementwise and can't be applied tile by tile"
    )


def _habit(state: dict[str, Any], name: str) -> Habit:
    """Sort what an optimizer keeps for a parameter into arrays and scalars."""
    arrays, scalars = [], {}
    for key, value in state.items():
        if value is None:
            continue
        if not _is_tensor(value):
            raise OptimizerError(
                f"{name} keeps {key!r} of type {type(value).__name__} for each parameter; only "
                "tensors can be streamed"
            )
        if value.shape == (_STUDY_NUMEL,):
            if str(value.dtype) != "torch.float32":
                raise OptimizerError(
                    f"{name} keeps {key!r} as {value.dtype}; only float32 state is streamed"
                )
            arrays.append(key)
        elif value.numel() == 1:
            scalars[key] = value.new_zeros(value.shape)
        else:
            raise OptimizerError(
                f"{name} keeps {key!r} of shape {tuple(value.shape)} for a parameter of "
                f"{_STUDY_NUMEL} elements: it is not elementwise"
            )
    return Habit(arrays=tuple(arrays), scalars=scalars, cut_numel=1)


class _Trial:
    """The same parameters, gradients and hyper-parameters, cut in different ways.

    One parameter for each param group; the parts of all of them are updated one after the other,
    each by a loan of its own, as tiles are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        import torch

        self._optimizer = optimizer
        generator = torch.Generator().manual_seed(0x71E5)
        shape = (_STUDY_STEPS + 1, len(optimizer.param_groups), _STUDY_NUMEL)
        values = torch.randn(shape, generator=generator, dtype=torch.float32)
        values[:, :, ::50] = 0.0
        values[:, :, 1::50] = -0.0
        self._values = values.to(device)

    def run(self, parts: tuple[int, ...], habit: Habit | None = None) -> _Outcome:
        """A few steps in these parts; without a habit the optimizer makes its own state."""
        import torch

        mains = self._values[0].clone()
        runs = [
            Run(group, part, None, {} if habit is None else _zeros(habit, part))
            for group, main in enumerate(mains)
            for part in main.split(parts)
        ]
        options: dict[int, dict[str, Any]] = {}
        for grads in self._values[1:]:
            pieces = [piece for grad in grads for piece in grad.split(parts)]
            for run, piece in zip(runs, pieces, strict=True):
                run.grad = piece.clone()
            together = [runs] if parts == _WHOLE else [[run] for run in runs]
            changes: dict[int, dict[str, Any]] = {}
            for lent in together:
                changes |= self._step(lent, options)
            for index, changed in changes.items():
                options[index] = options.get(index, {}) | changed
        # Not `mains`: an optimizer may give a parameter other memory.
        return _Outcome(torch.cat([run.main for run in runs]), runs)

    def _step(self, runs: list[Run], options: dict[int, dict[str, Any]]) -> dict[int, Any]:
        with lend(self._optimizer, runs) as loan:
            for index, group in enumerate(loan.groups):
                group.update(GroupCopies().of(index, options.get(index, {})))
                # A schedule may start at 0, which would hide every difference.
                lr: Any = group.get("lr")
                group["lr"] = lr.fill_(1e-2) if _is_tensor(lr) else 1e-2
            loan.step()
            return {
                index: {name: value for name, value in changed.items() if name != "lr"}
                for index, changed in loan.changes().items()
            }


def _zeros(habit: Habit, part: torch.Tensor) -> dict[str, torch.Tensor]:
    state = {name: part.new_zeros(part.shape) for name in habit.arrays}
    return state | {name: value.clone() for name, value in habit.scalars.items()}


class _Outcome:
    """Parameters and state after the steps of a trial, joined over the parts of each group."""

    def __init__(self, mains: torch.Tensor, runs: list[Run]) -> None:
        self._mains = mains
        self._by_group: dict[int, list[dict[str, Any]]] = {}
        for run in runs:
            self._by_group.setdefault(run.group, []).append(run.state)

    @property
    def states(self) -> list[dict[str, Any]]:
        """The state of each group's first part."""
        return [parts[0] for parts in self._by_group.values()]

    def equals(self, other: _Outcome) -> bool:
        """Whether every bit of `other`, which may be cut differently, is the same."""
        import torch

        if not _same_bits(self._mains, other._mains):
            return False
        for group, (state,) in self._by_group.items():
            for name, value in state.items():
                theirs: Any = [part.get(name) for part in other._by_group[group]]
                if value is None:
                    if any(part is not None for part in theirs):
                        return False
                elif value.numel() == 1:
                    if not all(_same_bits(value, part) for part in theirs):
                        return False
                elif not _same_bits(value, torch.cat(theirs)):
                    return False
        return True


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
