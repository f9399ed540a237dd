"""The scalars that an optimizer keeps for each parameter (a step counter), for many at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, count, repeat
from operator import is_not
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["ScalarTable"]


class ScalarTable:
    """Holds each scalar of all shards side by side in one tensor.

    What the optimizer's ``state`` holds for a shard is that shard's element, a view. So all of
    them are read and written by a few operations, and still each is a tensor of its own: to
    change one in place changes that shard alone and counts at the next step, as it would without
    the table. Anybody may also put another tensor into the state (``load_state_dict`` does). It
    counts as well, and `write` puts the view back, unless the tensor is of another type, shape or
    device than the optimizer's own: then the new value gets the same.

    Parameters
    ----------
    optimizer
        Whose ``state`` it is; an entry may be missing, and then the scalar is as at the start.
    mains
        The keys in the state.
    starts
        The scalars before the first step, by name.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mains: Sequence[torch.Tensor],
        starts: Mapping[str, torch.Tensor],
    ) -> None:
        self._optimizer = optimizer
        self._mains = mains
        self._starts = starts
        self._tables = {
            name: start.expand(len(mains), *start.shape).clone() for name, start in starts.items()
        }
        self._views = {name: table.unbind() for name, table in self._tables.items()}
        self._live: dict[str, list[torch.Tensor]] = {}
        self._results: dict[str, list[torch.Tensor]] = {}
        self._result_of = np.zeros(len(mains), np.int64)

    def read(self) -> list[NDArray[np.float64]]:
        """Take down all scalars as they are before a step; their values, an array for each name."""
        self._live = {name: self._held(name) for name in self._starts}
        self._results = {name: [] for name in self._starts}
        return [self._values(name, live) for name, live in self._live.items()]

    def _held(self, name: str) -> list[torch.Tensor]:
        start, state = self._starts[name], self._optimizer.state
        return [held.get(name, start) for held in map(state.get, self._mains, repeat({}))]

    def _strangers(self, name: str, live: Sequence[torch.Tensor]) -> list[int]:
        """Which of these tensors are not views of the table."""
        return list(compress(count(), map(is_not, live, self._views[name])))

    def _values(self, name: str, live: Sequence[torch.Tensor]) -> NDArray[np.float64]:
        import torch

        values: NDArray[np.float64] = (
            self._tables[name].reshape(-1).to("cpu", torch.float64, copy=True).numpy()
        )
        if strangers := self._strangers(name, live):
            value_of = _values_by_id(live[index] for index in strangers)
            values[strangers] = [value_of[id(live[index])] for index in strangers]
        return values

    def copies(self, shards: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """For each of these shards copies of its scalars, as `read` found them, to be changed."""
        if not self._live:
            return [{} for _ in shards]
        columns = [_copies([live[shard] for shard in shards]) for live in self._live.values()]
        return [dict(zip(self._live, row, strict=True)) for row in zip(*columns, strict=True)]

    def note(
        self, spans: Sequence[tuple[int, int]], states: Sequence[Mapping[str, torch.Tensor]]
    ) -> None:
        """Take down what the step made of the scalars of some spans of shards, one state for each.

        Of two notes about a shard the later one counts.
        """
        for name, results in self._results.items():
            number = len(results)
            results += [state[name] for state in states]
            for first, stop in spans:
                self._result_of[first:stop] = number
                number += 1

    def write(self) -> None:
        """Set the scalars to what was noted since `read`, which is something for every shard."""
        import torch

        for name, results in self._results.items():
            table = self._tables[name]
            if results:
                own = _form(self._starts[name])
                alike = [
                    result
                    if _form(result) == own
                    else result.to(table.device).reshape(table.shape[1:])
                    for result in results
                ]
                order = torch.from_numpy(self._result_of).to(table.device)
                self._put(name, torch.stack(alike).index_select(0, order), self._live[name])
        self._live, self._results = {}, {}

    def _put(self, name: str, values: torch.Tensor, live: Sequence[torch.Tensor]) -> None:
        import torch

        self._tables[name].copy_(values)
        own = _form(self._starts[name])
        for shard in self._strangers(name, live):
            there, value = live[shard], self._views[name][shard]
            if _form(there) != own:
                value = torch.empty_like(there).copy_(values[shard].reshape(there.shape))
            self._optimizer.state[self._mains[shard]][name] = value

    def reset(self) -> None:
        """Set all scalars to what they are before the first step."""
        for name, start in self._starts.items():
            self._put(name, start.expand_as(self._tables[name]), self._held(name))

    def to_json(self) -> dict[str, list[list[float]]]:
        """All scalars as JSON values: for each name the runs of equal values, and their lengths."""
        found = {}
        for name in self._starts:
            values = self._values(name, self._held(name))
            starts = np.flatnonzero(np.append([True], values[1:] != values[:-1])[: len(values)])
            lengths = np.diff(starts, append=len(values))
            found[name] = [
                [value, length]
                for value, length in zip(values[starts].tolist(), lengths.tolist(), strict=True)
            ]
        return found

    def from_json(self, saved: Mapping[str, Any]) -> None:
        """Set all scalars to what `to_json` gave earlier."""
        import torch

        for name, table in self._tables.items():
            values = [value for value, times in saved[name] for _ in range(times)]
            column = torch.tensor(values, dtype=torch.float64, device="cpu").reshape(table.shape)
            self._put(name, column, self._held(name))


def _form(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return tensor.dtype, tensor.device, tensor.shape


def _copies(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """A copy of each; of several that are alike by one operation."""
    import torch

    if len(tensors) > 1 and len({_form(tensor) for tensor in tensors}) == 1:
        return torch.stack(tensors).unbind()
    return [tensor.clone() for tensor in tensors]


def _values_by_id(tensors: Iterable[torch.Tensor]) -> dict[int, float]:
    """The values of some tensors of one element, many of which may be one object."""
    import torch

    alike: defaultdict[Any, dict[int, torch.Tensor]] = defaultdict(dict)
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        alike[tensor.dtype, tensor.device][id(tensor)] = tensor
    values: dict[int, float] = {}
    for group in alike.values():
        # One transfer for all of them, where they are on a device.
        stacked = torch.stack([tensor.reshape(()) for tensor in group.values()])
        values.update(zip(group, map(float, stacked.tolist()), strict=True))
    return values
