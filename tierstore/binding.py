"""Joins an optimizer's parameters to their places on the tiles, and applies the update there."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tierstore.errors import LayoutError, OptimizerError
from tierstore.layout import StateLayout, Tile
from tierstore.scalars import ScalarTable
from tierstore.update import CUT_NUMEL, GroupCopies, Habit, Loan, Run, lend

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

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


class _Part(NamedTuple):
    """Neighbours on a tile that are updated as one: those of shards `shard` to `stop`.

    `tile_start` and `shard_start` are where they start in the tile and in the first shard.
    """

    shard: int
    stop: int
    tile_start: int
    shard_start: int
    numel: int


class ShardUpdate:
    """The step of one optimizer, tile by tile: `begin`, `visit` for every tile, `finish`.

    A visit costs as much as the parts that its tile falls into, however many shards they hold.
    What parts them, the differences between neighbouring shards, is found for all shards at once.

    Parameters
    ----------
    optimizer
        The user's optimizer. Its ``state`` holds the scalars (a step counter) for each main param
        and nothing else; its groups hold the main params. See `ScalarTable` for what may be
        done to the scalars between steps.
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
        self._scalars = ScalarTable(optimizer, [shard.main for shard in shards], habit.scalars)
        # Shards without elements lie on no tile. The others' places in this list are "solid".
        self._solid = [index for index, place in enumerate(layout.shards) if place.numel]
        self._empty = [index for index, place in enumerate(layout.shards) if not place.numel]
        self._starts = [layout.shards[index].array_start for index in self._solid]
        self._ends = [
            start + layout.shards[index].numel
            for start, index in zip(self._starts, self._solid, strict=True)
        ]
        self._check_cuts()
        self._joinable = self._joinable_for_good()
        self._cuts: list[int] = []
        self._grads: list[torch.Tensor | None] = []
        self._copies = GroupCopies()
        self._advanced_groups: dict[int, dict[str, Any]] = {}

    def _check_cuts(self) -> None:
        if self._habit.cut_numel == 1:
            return
        tile_numel = self._layout.tile_numel
        for index, start, end in zip(self._solid, self._starts, self._ends, strict=True):
            # Tiles are multiples of 64, so the first border in a shard stands for all that are.
            border = (start // tile_numel + 1) * tile_numel
            if border < end and start % CUT_NUMEL:
                raise OptimizerError(
                    f"{type(self._optimizer).__name__} is bit-identical only when parameters are "
                    f"cut at multiples of {CUT_NUMEL} elements, and the tiles cut "
                    f"{self._layout.shards[index].name} at element {border - start} of this "
                    "rank's shard. On the CPU fused=True does this: use fused=False (or "
                    "foreach=True)"
                )

    def _joinable_for_good(self) -> NDArray[np.bool_]:
        """Which solid neighbours may be updated as one, as far as no step can change it."""
        solid = [self._shards[index] for index in self._solid]
        kinds = [
            (self._groups[index], shard.weight_is_main, shard.weight.dtype)
            for index, shard in zip(self._solid, solid, strict=True)
        ]
        alike = np.array([left == right for left, right in pairwise(kinds)], np.bool_)
        starts, ends = np.array(self._starts, np.int64), np.array(self._ends, np.int64)
        # A vector kernel treats the last elements of a tensor differently.
        whole = (ends - starts)[:-1] % self._habit.cut_numel == 0
        joinable = _adjacent([shard.weight for shard in solid])
        joinable &= alike & whole & (ends[:-1] == starts[1:])
        return joinable

    def reset(self) -> None:
        """Put the scalars as they are before the first step into the optimizer's state."""
        self._scalars.reset()

    def begin(self) -> None:
        """Take down scalars and gradients of every shard as they are before the step."""
        columns = self._scalars.read()
        grads = (shard.main.grad for shard in self._shards)
        self._grads = [
            grad if grad is None or grad.is_contiguous() else grad.contiguous() for grad in grads
        ]
        goes_on = self._joinable & _adjacent([self._grads[index] for index in self._solid])
        for column in columns:
            values = column[self._solid]
            goes_on &= values[:-1] == values[1:]
        self._cuts = (np.flatnonzero(~goes_on) + 1).tolist()
        self._copies = GroupCopies()
        self._advanced_groups = {}

    def visit(self, views: TileViews) -> None:
        """Update one tile in place and copy the result into the model's weights."""
        parts = self._parts(views.tile)
        weights = [_stretched(self._shards[part.shard].weight, part) for part in parts]
        runs = self._runs(parts, weights, views.arrays)
        with lend(self._optimizer, runs, self._copies) as loan:
            loan.step()
        self._note(loan, [(part.shard, part.stop) for part in parts])
        self._keep(parts, runs, views.arrays)
        _copy_all(weights, [run.main for run in runs])

    def _parts(self, tile: Tile) -> list[_Part]:
        solid, starts, ends = self._solid, self._starts, self._ends
        end = tile.start + tile.numel
        first, stop = bisect_right(ends, tile.start), bisect_left(starts, end)
        if first == stop:
            return []
        cuts = self._cuts[bisect_right(self._cuts, first) : bisect_left(self._cuts, stop)]
        parts = []
        for left, right in pairwise([first, *cuts, stop]):
            shard_start = max(tile.start - starts[left], 0)
            start = starts[left] + shard_start
            numel = min(ends[right - 1], end) - start
            spanned = solid[left], solid[right - 1] + 1
            parts.append(_Part(*spanned, start - tile.start, shard_start, numel))
        return parts

    def _runs(
        self, parts: list[_Part], weights: list[torch.Tensor], arrays: dict[str, torch.Tensor]
    ) -> list[Run]:
        slices = _slices({name: arrays[name] for name in ("main", *self._habit.arrays)}, parts)
        mains = slices.pop("main")
        own = [n for n, part in enumerate(parts) if self._shards[part.shard].weight_is_main]
        _copy_all([mains[n] for n in own], [weights[n] for n in own])
        scalars = self._scalars.copies([part.shard for part in parts])
        runs = []
        for n, part in enumerate(parts):
            grad = self._grads[part.shard]
            lent = None if grad is None else _stretched(grad, part)
            state = {name: places[n] for name, places in slices.items()} | scalars[n]
            runs.append(Run(self._groups[part.shard], mains[n], lent, state))
        return runs

    def _note(self, loan: Loan, spans: Sequence[tuple[int, int]]) -> None:
        """Take down the counters that a step has moved on, for `finish`."""
        self._advanced_groups |= loan.changes()
        kept = len(self._habit.arrays) + len(self._habit.scalars)
        for run in loan.runs:
            if sum([value is not None for value in run.state.values()]) != kept:
                raise OptimizerError(
                    f"{type(self._optimizer).__name__} keeps {', '.join(map(str, run.state))} now, "
                    "and other state when it was attached; what is new has no place on the tier"
                )
        self._scalars.note(spans, [run.state for run in loan.runs])

    def _keep(self, parts: list[_Part], runs: list[Run], arrays: dict[str, torch.Tensor]) -> None:
        """Put tensors that the optimizer made itself to where it had been lent others."""
        for name in ("main", *self._habit.arrays):
            whole = arrays[name]
            start, itemsize = whole.data_ptr(), whole.element_size()
            for part, run in zip(parts, runs, strict=True):
                found = run.main if name == "main" else run.state[name]
                if found.data_ptr() != start + part.tile_start * itemsize:
                    whole[part.tile_start :][: part.numel].copy_(found)

    def finish(self) -> None:
        """Move the optimizer's own counters on, once for the whole step."""
        self._step_empty_shards()
        self._grads = []
        self._scalars.write()
        for index, changed in self._advanced_groups.items():
            live = self._optimizer.param_groups[index]
            for name, value in changed.items():
                if hasattr(live.get(name), "copy_"):
                    live[name].copy_(value)
                else:
                    live[name] = value

    def _step_empty_shards(self) -> None:
        """Let shards without elements, which lie on no tile, count the step like all others."""
        if not self._empty:
            return
        runs = []
        for index, scalars in zip(self._empty, self._scalars.copies(self._empty), strict=True):
            shard, grad = self._shards[index], self._grads[index]
            main = shard.weight.new_empty(0, dtype=shard.main.dtype)
            state = {name: main.clone() for name in self._habit.arrays} | scalars
            lent = None if grad is None else grad.view(-1)
            runs.append(Run(self._groups[index], main, lent, state))
        with lend(self._optimizer, runs, self._copies) as loan:
            loan.step()
        self._note(loan, [(index, index + 1) for index in self._empty])

    def counters(self) -> dict[str, Any]:
        """Step counters as JSON values: of each group, and of each shard in runs of equal ones."""
        groups = [
            {"step": int(group["step"])} if "step" in group else {}
            for group in self._optimizer.param_groups
        ]
        return {"groups": groups, "scalars": self._scalars.to_json()}

    def require_counters(self, counters: Mapping[str, Any]) -> None:
        """Refuse counters of an optimizer that keeps others, or keeps them elsewhere.

        Raises
        ------
        LayoutError
            Moments would go on with a step counter that starts anew.
        """
        found, wanted = set(counters["scalars"]), set(self._habit.scalars)
        if found != wanted or len(counters["groups"]) != len(self._optimizer.param_groups):
            raise LayoutError(
                f"the state was saved by an optimizer of {len(counters['groups'])} param groups "
                f"that keeps {', '.join(sorted(found)) or 'nothing'} for each parameter, and "
                f"{type(self._optimizer).__name__} has {len(self._optimizer.param_groups)} groups "
                f"and keeps {', '.join(sorted(wanted)) or 'nothing'}: step counters can't be "
                "taken over. Use the optimizer that saved it (with or without Apex, Transformer "
                "Engine)"
            )

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Set the optimizer's counters to what `counters` gave earlier.

        Raises
        ------
        LayoutError
            See `require_counters`; nothing has been set then.
        """
        self.require_counters(counters)
        for group, saved in zip(self._optimizer.param_groups, counters["groups"], strict=True):
            step: Any = group.get("step")
            if hasattr(step, "fill_"):
                step.fill_(saved.get("step", 0))
            elif "step" in saved:
                group["step"] = saved["step"]
            else:
                group.pop("step", None)
        self._scalars.from_json(counters["scalars"])


def _adjacent(tensors: Sequence[torch.Tensor | None]) -> NDArray[np.bool_]:
    """Whether each but the first starts in memory where the one before ends, in one allocation.

    To follow nothing, nothing is right.
    """
    starts, allocations, ends = (
        np.array(
            [
                (0, 0, 0)
                if tensor is None
                else (
                    (start := tensor.data_ptr()),
                    start - tensor.storage_offset() * (itemsize := tensor.element_size()),
                    start + tensor.numel() * itemsize,
                )
                for tensor in tensors
            ],
            np.int64,
        )
        .reshape(-1, 3)
        .T
    )
    joined: NDArray[np.bool_] = (ends[:-1] == starts[1:]) & (allocations[:-1] == allocations[1:])
    return joined


def _stretched(flat: torch.Tensor, part: _Part) -> torch.Tensor:
    """The part's elements of the tensor of its first shard, past the tensor's end if need be.

    Past the end lie the neighbours that `_adjacent` found in the same allocation.
    """
    if part.shard_start == 0 and flat.shape == (part.numel,):
        return flat
    return flat.as_strided((part.numel,), (1,), flat.storage_offset() + part.shard_start)


def _slices(
    arrays: dict[str, torch.Tensor], parts: Sequence[_Part]
) -> dict[str, list[torch.Tensor]]:
    """The parts' elements of each array of the tile."""
    numels, wanted, end = [], [], 0
    for part in parts:
        if gap := part.tile_start - end:
            numels.append(gap)
            wanted.append(False)
        numels.append(part.numel)
        wanted.append(True)
        end = part.tile_start + part.numel
    return {
        name: list(compress(array.split_with_sizes([*numels, array.numel() - end]), wanted))
        for name, array in arrays.items()
    }


def _copy_all(into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    """Copy each tensor into its partner; many that are alike by one operation."""
    import torch

    # By type: on CUDA torch 2.5 takes the first target's type for that of all.
    by_type: defaultdict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]]
    by_type = defaultdict(lambda: ([], []))
    for target, values in zip(into, source, strict=True):
        targets, sources = by_type[target.dtype]
        targets.append(target)
        sources.append(values)
    for targets, sources in by_type.values():
        if len(targets) == 1:
            targets[0].copy_(sources[0])
        else:
            torch._foreach_copy_(targets, sources)
