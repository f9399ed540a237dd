"""`RankState`: all optimizer state of one rank, stepped optimizer by optimizer, committed whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tierstore.errors import StateError
from tierstore.metrics import GIB, SweepMetrics
from tierstore.stream import StateStream, TileViews
from tierstore.window import Window

if TYPE_CHECKING:
    from tierstore.records import OptimizerLayout
    from tierstore.store import TierStore

__all__ = ["RankState", "Visit"]

_logger = logging.getLogger("tierstore.step")

Visit = Callable[[TileViews], None]


class RankState:
    """The store of a rank, its window, and the account of its steps.

    Parameters
    ----------
    store
        A new store; it is allocated here.
    optimizers
        The chain, in the order in which it steps.
    counters, restore
        Gives the step counters of all optimizers as JSON values, for the commit; and sets them to
        those of an earlier commit.

    Attributes
    ----------
    sweeps
        Sweeps of single optimizers finished in the steps that were committed.
    last, total
        Metrics of the last step, and sums over all of them.
    """

    def __init__(
        self,
        store: TierStore,
        optimizers: Sequence[OptimizerLayout],
        counters: Callable[[], Mapping[str, Any]],
        restore: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.store = store
        self.optimizers = {entry.name: entry for entry in optimizers}
        self._counters, self._restore = counters, restore
        store.allocate(optimizers)
        self.window = Window(store.device, store.config.slots, optimizers)
        self._streams = {entry.name: StateStream(store, entry, self.window) for entry in optimizers}
        names = list(self._streams)
        # In the order in which they step, and round again: which one steps after which.
        self._next = dict(zip(names, [*names[1:], names[0]], strict=True))
        self._swept: set[str] = set()
        self._current = SweepMetrics()
        self.sweeps = 0
        self.last: SweepMetrics | None = None
        self.total = SweepMetrics()

    @property
    def step(self) -> int:
        """Steps that were committed."""
        return 0 if self.store.committed is None else self.store.committed.step

    def fill(self, visits: Mapping[str, Visit]) -> None:
        """Write every array for the first time, from zeros and what the visits put in; commit."""
        self.store.begin()
        for name, stream in self._streams.items():
            stream.sweep(visits[name], reads=False)
        self.store.commit(self.step, self._counters())

    def rewrite(self, visits: Mapping[str, Visit]) -> None:
        """Let the visits change the state outside of a step; the rest is carried over; commit."""
        self._require_between_steps()
        self._free_window()
        self.store.begin()
        for name, stream in self._streams.items():
            stream.sweep(visits.get(name, lambda views: None))
        self.store.commit(self.step, self._counters())

    def look(self, name: str, visit: Visit, tiles: Sequence[int]) -> None:
        """Show some tiles of one optimizer's last committed state to a visit."""
        self._require_between_steps()
        self._free_window()
        self._streams[name].sweep(visit, order=tiles, writes=False)

    def advance(self, name: str, visit: Visit, finish: Callable[[], None]) -> None:
        """Step one optimizer of the chain; the last one to step commits for all.

        Parameters
        ----------
        name
            Which optimizer.
        visit
            Updates one tile.
        finish
            Moves the optimizer's counters on when all tiles are through.

        Raises
        ------
        StateError
            The optimizer steps again before the others of its chain have.
        TierStoreError
            What streaming or committing met; the store then needs a rollback.
        """
        if name in self._swept:
            missing = ", ".join(sorted(set(self._streams) - self._swept))
            raise StateError(
                f"{self.store}: {name} steps a second time, and {missing} has not stepped yet: "
                "all optimizers of a chain must step together"
            )
        self._free_window(but_of=name)
        if not self._swept:
            self._current = SweepMetrics()
            self.store.begin()
        self._current.add(self._streams[name].sweep(visit))
        finish()
        self._swept.add(name)
        if len(self._swept) == len(self._streams):
            self._swept.clear()
            self._commit_step()
        # The first tiles of the next step arrive while the trainer computes its gradients.
        self._streams[self._next[name]].prefetch()

    def _free_window(self, but_of: str | None = None) -> None:
        """Drop what was prefetched, except for one optimizer."""
        for name, stream in self._streams.items():
            if name != but_of:
                stream.drop()

    def _commit_step(self) -> None:
        started = time.perf_counter()
        self.store.commit(self.step + 1, self._counters())
        self._current.commit_s = time.perf_counter() - started
        self._current.wall_s += self._current.commit_s
        self.sweeps += len(self._streams)
        self.last = self._current
        self.total.add(self._current)
        _logger.info(
            "step %d rank %d tier=%s %s (%.3f GiB)",
            self.step,
            self.store.identity.rank,
            self.store.tier,
            self.last.line(),
            self.window.nbytes / GIB,
        )

    def rollback(self) -> None:
        """Return to the last committed step after an error.

        Arrays and step counters are those of that step again. The model's weights are not: tiles
        that were updated before the error have written theirs. Put them back from ``main``, or
        load a checkpoint.

        Raises
        ------
        StateError
            The tier overwrites in place.
        TransferTimeoutError
            A transfer is still on its way.
        """
        self._free_window()
        self.store.rollback()
        self._swept.clear()
        if self.store.committed is not None:
            self._restore(self.store.committed.state)

    def _require_between_steps(self) -> None:
        if self._swept:
            raise StateError(
                f"{self.store}: {', '.join(sorted(self._swept))} stepped and the rest of the "
                "chain has not; the state can't be read or changed in between"
            )

    def close(self, *, discard: bool = False) -> None:
        """Give back window, memory and threads; see `TierStore.close`."""
        self.store.close(discard=discard)
        self._free_window()
        self._streams.clear()
        self.window.slots.clear()
