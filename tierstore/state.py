"""`RankState`: all optimizer state of one rank, stepped optimizer by optimizer, committed whole."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tierstore.errors import LayoutError, PeerError, StateError
from tierstore.metrics import GIB, SweepMetrics
from tierstore.ranks import Alone, Ranks
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
        A new store, which is allocated here, or one that was opened.
    optimizers
        The chain, in the order in which it steps.
    counters, restore
        Gives the step counters of all optimizers as JSON values, for the commit; and sets them to
        those of an earlier commit.
    ranks
        All ranks of the job. They agree on every step: what fails on one fails on all.
    chain_length
        Optimizers of the rank that has most; None is this one.

    Attributes
    ----------
    sweeps
        Sweeps of single optimizers finished in the steps that were committed.
    last, total
        Metrics of the last step, and sums over all of them.
    job
        JSON values that go with every commit from now on.
    """

    def __init__(
        self,
        store: TierStore,
        optimizers: Sequence[OptimizerLayout],
        counters: Callable[[], Mapping[str, Any]],
        restore: Callable[[Mapping[str, Any]], None],
        ranks: Ranks | None = None,
        chain_length: int | None = None,
    ) -> None:
        self.store = store
        self.job: dict[str, Any] = {}
        self._ranks = Alone() if ranks is None else ranks
        self._chain_length = len(optimizers) if chain_length is None else chain_length
        self.optimizers = {entry.name: entry for entry in optimizers}
        self._counters, self._restore = counters, restore
        if store.committed is None:
            store.allocate(optimizers)
        else:
            _require_same(store, self.optimizers)
            self.job = dict(store.committed.job)
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
        self._commit(self.step)

    def load(
        self, step: int, visits: Mapping[str, Visit], counters: Mapping[str, Any], job: Any
    ) -> None:
        """Replace all state by that of another step, from zeros and what the visits put in; commit.

        Parameters
        ----------
        step
            The step that the new state is of.
        visits
            Put the state on each tile, by optimizer.
        counters, job
            Step counters of all optimizers, and what goes with the commit.

        Raises
        ------
        PeerError
            Another rank could not; no rank has the new state then, unless its commit failed.
        TierStoreError
            Whatever this rank met. Load again, or roll back where the tier can.
        """

        def fill() -> None:
            self._swept.clear()
            self._free_window()
            self.store.begin(anew=True)
            for name, stream in self._streams.items():
                stream.sweep(visits[name], reads=False)

        def commit() -> None:
            self._restore(counters)
            self.job = dict(job)
            self._commit(step)

        # Nobody commits what another rank could not write: they would go on from two states.
        self._everywhere(fill, f"write step {step}")
        self._everywhere(commit, f"commit step {step}")

    def _everywhere(self, call: Callable[[], None], what: str) -> None:
        """Make a call that succeeds on every rank, or raises on every rank."""
        try:
            call()
        except Exception as error:
            self._fail_everywhere(error)
            raise
        if self._ranks.agree(self.step, failed=False).failed:
            refusal = PeerError(f"{self.store}: another rank could not {what} (its log says why)")
            self.store.fail(refusal)
            raise refusal

    def _fail_everywhere(self, error: Exception) -> None:
        self.store.fail(error)
        # The others are on their way to the same call, and would wait in their next collective
        # for a rank that is not coming. What they say is not the news here.
        with contextlib.suppress(PeerError):
            self._ranks.agree(self.step, failed=True)

    def rewrite(self, visits: Mapping[str, Visit]) -> None:
        """Let the visits change the state outside of a step; the rest is carried over; commit."""
        self._require_between_steps()
        self._free_window()
        self.store.begin()
        for name, stream in self._streams.items():
            stream.sweep(visits.get(name, lambda views: None))
        self._commit(self.step)

    def look(self, name: str, visit: Visit, tiles: Sequence[int]) -> None:
        """Show some tiles of one optimizer's last committed state to a visit."""
        self._require_between_steps()
        self._free_window()
        self._streams[name].sweep(visit, order=tiles, writes=False)

    def advance(
        self,
        name: str,
        visit: Visit,
        finish: Callable[[], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Step one optimizer of the chain; the last one to step commits for all.

        Parameters
        ----------
        name
            Which optimizer.
        visit
            Updates one tile.
        finish
            Moves the optimizer's counters on when all tiles are through.
        prepare
            What comes before the first tile. What it raises the other ranks hear of as well.

        Raises
        ------
        StateError
            The optimizer steps again before the others of its chain have.
        PeerError
            Another rank failed in this step, or does not answer; the store then needs a rollback.
        TierStoreError
            What streaming or committing met; likewise.
        """
        try:
            prepare()
            self._advance(name, visit, finish)
        except Exception as error:
            self._fail_everywhere(error)
            raise
        self._require_success_everywhere(last=not self._swept)
        # The first tiles of the next step arrive while the trainer computes its gradients.
        self._streams[self._next[name]].prefetch()

    def _require_success_everywhere(self, *, last: bool) -> None:
        """Hear how the others fared; `last` when all of this rank has committed the same step."""
        # A rank whose chain is shorter than another's waits for the rest of that one's.
        calls = 1 + (self._chain_length - len(self._streams) if last else 0)
        try:
            for call in range(calls):
                agreement = self._ranks.agree(self.step, failed=False)
                whole = last and call == calls - 1
                apart = whole and agreement.lowest_step != agreement.highest_step
                if agreement.failed or apart:
                    raise PeerError(
                        f"{self.store}: another rank failed in step {self.step} (its log says "
                        "why); roll back on all ranks, or start again and resume"
                    )
        except BaseException as error:
            self.store.fail(error)
            raise

    def _advance(self, name: str, visit: Visit, finish: Callable[[], None]) -> None:
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

    def _commit(self, step: int) -> None:
        self.store.commit(step, self._counters(), self.job)

    def _free_window(self, but_of: str | None = None) -> None:
        """Drop what was prefetched, except for one optimizer."""
        for name, stream in self._streams.items():
            if name != but_of:
                stream.drop()

    def _commit_step(self) -> None:
        started = time.perf_counter()
        self._commit(self.step + 1)
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
        """Return to the last step that every rank has committed, after an error; all ranks call it.

        Arrays and step counters are those of that step again. The model's weights are not: tiles
        that were updated before the error have written theirs. Put them back from ``main``, or
        load a checkpoint.

        Raises
        ------
        PeerError
            A rank does not answer.
        StateError
            The tier overwrites in place.
        TransferTimeoutError
            A transfer is still on its way.
        """
        lowest_step = self._ranks.agree(self.step, failed=False).lowest_step
        self._free_window()
        self.store.rollback(lowest_step)
        self._swept.clear()
        if self.store.committed is not None:
            self._restore(self.store.committed.state)
            self.job = dict(self.store.committed.job)

    def freeze(self, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        """Keep the last step under a name, on every rank or on none; all ranks call it.

        No bytes are copied, and training goes on at once: see `TierStore.freeze`. What `prepare`
        raises the other ranks hear of as well.

        Raises
        ------
        PeerError
            Another rank could not; nothing is kept here either.
        TierStoreError
            Whatever this rank met.
        """
        failure = None
        try:
            self._require_between_steps()
            prepare()
            self.store.freeze(name)
        except Exception as error:  # raised below, when every rank knows
            failure = error
        failed = self._ranks.agree(self.step, failed=failure is not None).failed
        if failure is not None:
            raise failure
        if failed:
            self.store.release(name)
            raise PeerError(f"{self.store}: another rank could not keep step {self.step} as {name}")

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


def _require_same(store: TierStore, optimizers: Mapping[str, OptimizerLayout]) -> None:
    wanted = {name: entry.fingerprint for name, entry in optimizers.items()}
    found = {name: entry.fingerprint for name, entry in store.optimizers.items()}
    if wanted != found:
        raise LayoutError(
            f"{store} holds state of another layout: other parameters, other parallel sizes, or "
            "other tiles and chunks. Load a checkpoint into a new store"
        )
