"""A rank's state on a tier, built by hand as an adapter for a framework would build it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.problem import Problem, make_optimizer
from tierstore.binding import BoundShard, ShardUpdate
from tierstore.config import TierConfig
from tierstore.device import open_device
from tierstore.layout import Shard, StateLayout
from tierstore.records import Identity, OptimizerLayout
from tierstore.registry import tier_class
from tierstore.state import RankState
from tierstore.store import TierStore
from tierstore.stream import TileViews
from tierstore.update import study

__all__ = ["NAME", "Streamed", "streamed"]

NAME = "opt-0"


class Streamed:
    """A problem whose optimizer state is in a store.

    Parameters
    ----------
    problem
        Weights and gradients; the weights are updated in place.
    store
        A new store; it is allocated and filled here.
    optimizer
        A name of `OPTIMIZERS`.

    Attributes
    ----------
    layout, state
        The arrays, and what steps them.
    allocate_s, fill_s
        Seconds that reserving the tier and writing the first generation took.
    """

    def __init__(self, problem: Problem, store: TierStore, optimizer: str) -> None:
        device = problem.weight.device
        places = problem.parameters()
        # A main param only gives its shape and its gradient; what it holds is on the tier.
        nothing = torch.full((1,), torch.nan, device=device)
        mains = [nothing.expand(place.stop - place.start) for place in places]
        for main, place in zip(mains, places, strict=True):
            main.grad = problem.grad[place]
        self._optimizer = make_optimizer(optimizer, mains)
        habit = study(self._optimizer, device)
        shards = [
            Shard(
                name=f"weight-{index}",
                numel=place.stop - place.start,
                array_start=place.start,
                local_shape=(place.stop - place.start,),
                weight_dtype="bfloat16",
            )
            for index, place in enumerate(places)
        ]
        self._problem = problem
        self.layout = OptimizerLayout(
            name=NAME,
            layout=StateLayout.plan(
                shards, chunk_numel=store.config.chunk_numel, tile_numel=store.config.tile_numel
            ),
            arrays=dict.fromkeys(("main", *habit.arrays), "float32"),
        )
        bound = [
            BoundShard(main=main, weight=problem.weight[place], weight_is_main=False)
            for main, place in zip(mains, places, strict=True)
        ]
        self._update = ShardUpdate(self._optimizer, self.layout.layout, habit, bound)
        started = time.perf_counter()
        self.state = RankState(store, [self.layout], self._counters, self._restore)
        self.allocate_s = time.perf_counter() - started
        started = time.perf_counter()
        self.state.fill({NAME: self._fill})
        store.device.synchronize()
        self.fill_s = time.perf_counter() - started

    def _counters(self) -> dict[str, Any]:
        return {NAME: self._update.counters()}

    def _restore(self, counters: Mapping[str, Any]) -> None:
        self._update.restore(counters[NAME])

    def _fill(self, views: TileViews) -> None:
        # As trainers do it: the fp32 main params start as what the weights say.
        place = slice(views.tile.start, views.tile.start + views.tile.numel)
        views.arrays["main"].copy_(self._problem.weight[place])

    def step(self) -> None:
        """One optimizer step; its metrics are then ``state.last``."""
        self._update.begin()
        self.state.advance(NAME, self._update.visit, self._update.finish)

    def come_to_rest(self) -> None:
        """Return when nothing is under way.

        A step ends by reading the first tiles of the next one ahead. With this in its time, every
        step is charged for as many bytes as it has: those read ahead for it were the last step's.
        """
        self.state.store.settle()
        self.state.store.device.synchronize()

    def arrays(self) -> dict[str, torch.Tensor]:
        """The committed state, whole, on the device of the weights."""
        numel, device = self._problem.numel, self._problem.weight.device
        found = {name: torch.empty(numel, device=device) for name in self.layout.arrays}

        def take(views: TileViews) -> None:
            for name, whole in found.items():
                whole[views.tile.start :][: views.tile.numel] = views.arrays[name]

        self.state.look(NAME, take, range(self.layout.layout.n_tiles))
        return found


@contextlib.contextmanager
def streamed(problem: Problem, config: TierConfig, optimizer: str) -> Iterator[Streamed]:
    """A `Streamed` whose store is removed at the end, whatever happens.

    Raises
    ------
    TierStoreError
        No such tier, or no room on it.
    """
    device = open_device(problem.weight.device)
    store = tier_class(config.tier)(config, device, Identity(nonce=secrets.token_hex(4)))
    try:
        yield Streamed(problem, store, optimizer)
    finally:
        store.close(discard=True)
