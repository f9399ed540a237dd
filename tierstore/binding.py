"""Joins an optimizer's parameters to their places on the tiles, and applies the update there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierstore.errors import LayoutError, OptimizerError
from tierstore.layout import Extent, StateLayout
from tierstore.update import CUT_NUMEL, Habit, Loan, Run, lend

if TYPE_CHECKING:
    import torch

    from tierstore.stream import TileViews

__all__ = ["BoundShard", "ShardUpdate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundShard:
    """The tensors that one shard of a layout stands for.

    Parameters
    ----------
    main
        What the optimizer's groups hold for the shard; its ``grad`` (fp32, ``numel`` elements) is
        read at each step.
    weight
        Flat view, ``numel`` elements, of the model's weight, written after each update.
    weight_is_main
        The weight is fp32 and its own main param: it is the truth, and the tier's ``main`` is a
        shadow of it.
    """

    main: torch.Tensor
    weight: torch.Tensor
    weight_is_main: bool


class ShardUpdate:
    """The step of one optimizer, tile by tile: `begin`, `visit` for every tile, `finish`.

    Parameters
    ----------
    optimizer
        The user's optimizer. Its ``state`` holds the scalars (a step counter) for each main param
        and nothing else; its groups hold the main params.
    layout
        Where the shards lie.
    habit
        What `study` found.
    shards
        One for each shard of the layout, in its order.

    Raises
    ------
    OptimizerError
        The optimizer needs cuts at multiples of 64 elements, and the layout has others.
    LayoutError
        A weight is not one contiguous stretch of memory.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layout: StateLayout,
        habit: Habit,
        shards: Sequence[BoundShard],
    ) -> None:
        self._optimizer = optimizer
        self._layout = layout
        self._habit = habit
        self._shards = shards
        for shard, place in zip(shards, layout.shards, strict=True):
            if not shard.weight.is_contiguous() or shard.weight.numel() != place.numel:
                raise LayoutError(
                    f"the weight of {place.name} is not {place.numel} elements side by side"
                )
        group_of = {
            id(main): index
            for index, group in enumerate(optimizer.param_groups)
            for main in group["params"]
        }
        self._groups = [group_of[id(shard.main)] for shard in shards]
        self._stretches = [self._merge(layout.extents(tile)) for tile in range(layout.n_tiles)]
        self._scalars: list[tuple[float, ...]] = []
        self._grads: list[torch.Tensor | None] = []
        self._advanced: dict[int, dict[str, torch.Tensor]] = {}
        self._advanced_groups: dict[int, dict[str, Any]] = {}
        self._check_cuts()

    def _check_cuts(self) -> None:
        if self._habit.cut_numel == 1:
            return
        for stretches in self._stretches:
            for extent in (extent for stretch in stretches for extent in stretch):
                if extent.shard_start % CUT_NUMEL:
                    raise OptimizerError(
                        f"{type(self._optimizer).__name__} is bit-identical only when parameters "
                        f"are cut at multiples of {CUT_NUMEL} elements, and the tiles cut "
                        f"{self._layout.shards[extent.shard].name} at element "
                        f"{extent.shard_start} of this rank's shard. On the CPU fused=True does "
                        "this: use fused=False (or foreach=True)"
                    )

    def _merge(self, extents: Iterable[Extent]) -> list[tuple[Extent, ...]]:
        """Extents that lie side by side and may be updated as one, as far as is known for good."""
        stretches: list[list[Extent]] = []
        for extent in extents:
            if stretches and self._joins(stretches[-1][-1], extent):
                stretches[-1].append(extent)
            else:
                stretches.append([extent])
        return [tuple(stretch) for stretch in stretches]

    def _joins(self, left: Extent, right: Extent) -> bool:
        mine, other = self._shards[left.shard], self._shards[right.shard]
        return (
            left.tile_start + left.numel == right.tile_start
            and self._groups[left.shard] == self._groups[right.shard]
            and mine.weight_is_main == other.weight_is_main
            and mine.weight.dtype == other.weight.dtype
            # A vector kernel treats the last elements of a tensor differently.
            and (self._habit.cut_numel == 1 or left.numel % CUT_NUMEL == 0)
            and _adjacent(mine.weight[left.in_shard], other.weight[right.in_shard])
        )

    def begin(self) -> None:
        """Take down scalars and gradients of every shard as they are before the step."""
        live = [self._live(shard) for shard in self._shards]
        columns = [_values([scalars[name] for scalars in live]) for name in self._habit.scalars]
        self._scalars = list(zip(*columns, strict=True)) if columns else [()] * len(self._shards)
        self._grads = [
            None if shard.main.grad is None else shard.main.grad.contiguous().view(-1)
            for shard in self._shards
        ]
        self._advanced, self._advanced_groups = {}, {}

    def _live(self, shard: BoundShard) -> dict[str, torch.Tensor]:
        """The optimizer's scalars for a shard; before the first step there may be none yet."""
        state = self._optimizer.state.get(shard.main, {})
        return {name: state.get(name, start) for name, start in self._habit.scalars.items()}

    def visit(self, views: TileViews) -> None:
        """Update one tile in place and copy the result into the model's weights."""
        parts = [
            part for stretch in self._stretches[views.tile.index] for part in self._split(stretch)
        ]
        runs = [self._run(part, views.arrays) for part in parts]
        with lend(self._optimizer, runs) as loan:
            loan.step()
        for part, run in zip(parts, runs, strict=True):
            self._keep(part, run, views.arrays)
        shards = [[extent.shard for extent in part] for part in parts]
        self._note(loan, zip(runs, shards, strict=True))

    def _note(self, loan: Loan, runs: Iterable[tuple[Run, Sequence[int]]]) -> None:
        """Take down the counters that a step has moved on, for `finish`."""
        self._advanced_groups |= loan.changes()
        kept = len(self._habit.arrays) + len(self._habit.scalars)
        for run, shards in runs:
            if sum(value is not None for value in run.state.values()) != kept:
                raise OptimizerError(
                    f"{type(self._optimizer).__name__} keeps {', '.join(map(str, run.state))} now, "
                    "and other state when it was attached; what is new has no place on the tier"
                )
            scalars = {name: run.state[name] for name in self._habit.scalars}
            for shard in shards:
                self._advanced[shard] = scalars

    def _split(self, stretch: tuple[Extent, ...]) -> Iterable[list[Extent]]:
        """Split a stretch where steps, presence of a gradient or places of gradients differ."""
        part: list[Extent] = []
        for extent in stretch:
            if part and not self._goes_on(part[-1], extent):
                yield part
                part = []
            part.append(extent)
        yield part

    def _goes_on(self, left: Extent, right: Extent) -> bool:
        if self._scalars[left.shard] != self._scalars[right.shard]:
            return False
        mine, other = self._grads[left.shard], self._grads[right.shard]
        if mine is None or other is None:
            return mine is other
        return _adjacent(mine[left.in_shard], other[right.in_shard])

    def _run(self, part: list[Extent], arrays: dict[str, torch.Tensor]) -> Run:
        first, last = part[0], part[-1]
        place = slice(first.tile_start, last.tile_start + last.numel)
        numel = place.stop - place.start
        shard = self._shards[first.shard]
        main = arrays["main"][place]
        if shard.weight_is_main:
            main.copy_(_stretched(shard.weight, first.shard_start, numel))
        grad = self._grads[first.shard]
        return Run(
            group=self._groups[first.shard],
            main=main,
            grad=None if grad is None else _stretched(grad, first.shard_start, numel),
            state={name: arrays[name][place] for name in self._habit.arrays}
            | self._copied_scalars(shard),
        )

    def _copied_scalars(self, shard: BoundShard) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self._live(shard).items()}

    def _keep(self, part: list[Extent], run: Run, arrays: dict[str, torch.Tensor]) -> None:
        first = part[0]
        for name in self._habit.arrays:
            place = arrays[name][first.tile_start : first.tile_start + run.main.numel()]
            if run.state[name].data_ptr() != place.data_ptr():
                # The optimizer put a new tensor where it had been lent one.
                place.copy_(run.state[name])
        shard = self._shards[first.shard]
        _stretched(shard.weight, first.shard_start, run.main.numel()).copy_(run.main)

    def finish(self) -> None:
        """Move the optimizer's own counters on, once for the whole step."""
        self._step_empty_shards()
        self._grads = []
        for index, scalars in self._advanced.items():
            self._set_scalars(index, scalars)
        for index, changed in self._advanced_groups.items():
            live = self._optimizer.param_groups[index]
            for name, value in changed.items():
                if hasattr(live.get(name), "copy_"):
                    live[name].copy_(value)
                else:
                    live[name] = value

    def _set_scalars(self, shard: int, scalars: dict[str, torch.Tensor]) -> None:
        state = self._optimizer.state[self._shards[shard].main]
        for name, value in scalars.items():
            if name in state:
                state[name].copy_(value)
            else:
                state[name] = value.clone()

    def _step_empty_shards(self) -> None:
        """Let shards without elements, which lie on no tile, count the step like all others."""
        empty = [index for index, shard in enumerate(self._layout.shards) if not shard.numel]
        if not empty:
            return
        runs = []
        for index in empty:
            shard, grad = self._shards[index], self._grads[index]
            main = shard.weight.new_empty(0, dtype=shard.main.dtype)
            state = {name: main.clone() for name in self._habit.arrays}
            state |= self._copied_scalars(shard)
            runs.append(Run(self._groups[index], main, grad, state))
        with lend(self._optimizer, runs) as loan:
            loan.step()
        self._note(loan, ((run, [index]) for index, run in zip(empty, runs, strict=True)))

    def counters(self) -> dict[str, Any]:
        """Step counters as JSON values: of each group, and of each shard in runs of equal ones."""
        groups = [
            {"step": int(group["step"])} if "step" in group else {}
            for group in self._optimizer.param_groups
        ]
        scalars = {}
        for name in self._habit.scalars:
            runs: list[list[float]] = []
            for value in _values([self._live(shard)[name] for shard in self._shards]):
                if runs and runs[-1][0] == value:
                    runs[-1][1] += 1
                else:
                    runs.append([value, 1])
            scalars[name] = runs
        return {"groups": groups, "scalars": scalars}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Set the optimizer's counters to what `counters` gave earlier."""
        for group, saved in zip(self._optimizer.param_groups, counters["groups"], strict=True):
            step: Any = group.get("step")
            if hasattr(step, "fill_"):
                step.fill_(saved.get("step", 0))
            elif "step" in saved:
                group["step"] = saved["step"]
            else:
                group.pop("step", None)
        for name, start in self._habit.scalars.items():
            values = [value for value, times in counters["scalars"][name] for _ in range(times)]
            for index, value in enumerate(values):
                self._set_scalars(index, {name: start.clone().fill_(value)})


def _values(scalars: Sequence[torch.Tensor]) -> list[float]:
    import torch

    if not scalars:
        return []
    # One transfer for all of them, where they are on a device.
    return [float(value) for value in torch.stack([s.reshape(()) for s in scalars]).tolist()]


def _adjacent(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether `right` starts in memory where `left` ends, in the same allocation."""
    return (
        left.data_ptr() + left.numel() * left.element_size() == right.data_ptr()
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    )


def _stretched(flat: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    """`numel` elements from element `start` of a flat tensor on, past its end if need be.

    Past the end lie the neighbours that `_adjacent` found in the same allocation.
    """
    return flat.as_strided((numel,), (1,), flat.storage_offset() + start)
