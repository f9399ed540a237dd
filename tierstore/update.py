"""The update is the user's own optimizer: its groups and state are lent to the views of one tile.

`study` finds out by trying, once, how an optimizer behaves: which state it keeps for each element,
where its step counter lives, and whether a parameter may be cut anywhere without changing a bit.
`lend` then runs the optimizer's own ``step`` on any tensors that stand in for parameters.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierstore.errors import OptimizerError

if TYPE_CHECKING:
    import torch

__all__ = ["CUT_NUMEL", "Habit", "Run", "lend", "study", "take_step"]

CUT_NUMEL = 64
"""Cuts at multiples of this many elements suit every vector width that torch's kernels use."""

_STUDY_NUMEL = 1000
_STUDY_STEPS = 3


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


@contextmanager
def lend(optimizer: torch.optim.Optimizer, runs: Sequence[Run]) -> Iterator[list[dict[str, Any]]]:
    """Let the optimizer own these runs instead of its parameters, while the block lasts.

    Hyper-parameters are those of the live groups. Hooks on ``step`` are kept from running, since
    they are for steps and not for tiles.

    Yields
    ------
    list of dict
        The lent groups: copies of the live ones, so that what a step changes in them (an Apex
        step counter) can be seen and does not touch the live ones.
    """
    own = optimizer.param_groups, optimizer.state
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in own[0]]
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    for run in runs:
        run.main.grad = run.grad
        groups[run.group]["params"].append(run.main)
        if run.state:
            state[run.main] = run.state
    optimizer.param_groups, optimizer.state = groups, state
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        yield groups
    finally:
        for run in runs:
            run.main.grad = None
        optimizer.param_groups, optimizer.state = own
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """The class's own step, whatever stands in for it on the instance."""
    type(optimizer).step(optimizer)


def study(optimizer: torch.optim.Optimizer, device: torch.device) -> Habit:
    """Find out how an optimizer behaves by a few steps on small random tensors.

    The optimizer's own parameters, state, groups and torch's random state are not touched.

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
        would differ when it is applied tile by tile.
    """
    trial = _Trial(optimizer, device)
    whole = trial.run([_STUDY_NUMEL])
    arrays, scalars = [], {}
    for name, value in whole.states[0].items():
        if value is None:
            continue
        if not hasattr(value, "shape"):
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps {name!r} of type {type(value).__name__} for "
                "each parameter; only tensors can be streamed"
            )
        if value.shape == (_STUDY_NUMEL,):
            if str(value.dtype) != "torch.float32":
                raise OptimizerError(
                    f"{type(optimizer).__name__} keeps {name!r} as {value.dtype}; only float32 "
                    "state is streamed"
                )
            arrays.append(name)
        elif value.numel() == 1:
            scalars[name] = value.new_zeros(value.shape)
        else:
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps {name!r} of shape {tuple(value.shape)} for a "
                f"parameter of {_STUDY_NUMEL} elements: it is not elementwise"
            )
    habit = Habit(arrays=tuple(arrays), scalars=scalars, cut_numel=1)
    if not whole.equals(trial.run([_STUDY_NUMEL], habit)):
        raise OptimizerError(
            f"the state of {type(optimizer).__name__} does not start as zeros, so it can't be laid "
            "out before the first step"
        )
    if whole.equals(trial.run([1, 7, 92, 333, 566, 1], habit)):
        return habit
    if whole.equals(trial.run([64, 128, 384, 424], habit)):
        return Habit(arrays=habit.arrays, scalars=scalars, cut_numel=CUT_NUMEL)
    raise OptimizerError(
        f"{type(optimizer).__name__} gives another result when a parameter is cut: it is not "
        "elementwise and can't be applied tile by tile"
    )


class _Trial:
    """The same parameter, gradients and hyper-parameters, cut in different ways."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        import torch

        self._optimizer = optimizer
        generator = torch.Generator().manual_seed(0x71E5)
        shape = (_STUDY_STEPS + 1, len(optimizer.param_groups), _STUDY_NUMEL)
        values = torch.randn(shape, generator=generator)
        values[:, :, ::50] = 0.0
        self._values = values.to(device)

    def run(self, parts: list[int], habit: Habit | None = None) -> _Outcome:
        """A few steps on every group's parameter in these parts.

        Without a habit the optimizer makes its own state.
        """
        import torch

        mains = self._values[0].clone()
        runs: list[Run] = []
        for group, main in enumerate(mains):
            for part in main.split(parts):
                state = {}
                if habit is not None:
                    state = {name: torch.zeros_like(part) for name in habit.arrays}
                    state |= {name: value.clone() for name, value in habit.scalars.items()}
                runs.append(Run(group, part, None, state))
        states: list[dict[str, Any]] = []
        with lend(self._optimizer, runs) as lent:
            for options in lent:
                # A schedule may start at 0, which would hide every difference.
                if isinstance(options.get("lr"), float):
                    options["lr"] = 1e-2
            for grads in self._values[1:]:
                for group, grad in enumerate(grads):
                    own = [run for run in runs if run.group == group]
                    for run, part in zip(own, grad.split(parts), strict=True):
                        run.main.grad = part.clone()
                take_step(self._optimizer)
            states = [dict(self._optimizer.state[run.main]) for run in runs]
        return _Outcome(mains, states, [run.group for run in runs])


@dataclass(slots=True)
class _Outcome:
    mains: torch.Tensor
    states: list[dict[str, Any]]
    groups: list[int]

    def equals(self, other: _Outcome) -> bool:
        """Bit-equality of parameters and per-element state, joined over the parts."""
        import torch

        if not torch.equal(self.mains, other.mains):
            return False
        for group in set(self.groups):
            for name, value in self.states[self.groups.index(group)].items():
                if value is None:
                    continue
                mine, theirs = (
                    [s[name] for s, g in zip(o.states, o.groups, strict=True) if g == group]
                    for o in (self, other)
                )
                if value.numel() == 1:
                    if not all(torch.equal(value, part) for part in theirs):
                        return False
                elif not torch.equal(torch.cat(mine), torch.cat(theirs)):
                    return False
        return True
