"""`StateStream`: one pass over all tiles of an optimizer, with reads, visits and writes at once."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tierstore.errors import TierStoreError, TransferTimeoutError
from tierstore.metrics import SweepMetrics
from tierstore.schedule import Place, SweepSchedule

if TYPE_CHECKING:
    import torch

    from tierstore.device import Events
    from tierstore.layout import Tile
    from tierstore.records import OptimizerLayout
    from tierstore.store import TierStore
    from tierstore.window import Slot, Window

__all__ = ["StateStream", "TileViews"]


@dataclass(frozen=True, slots=True)
class TileViews:
    """One tile in the window, as the visitor sees it.

    Parameters
    ----------
    tile
        Which one.
    arrays
        Array name to a flat tensor of ``tile.numel`` elements, to read and change in place.
    """

    tile: Tile
    arrays: dict[str, torch.Tensor]


class StateStream:
    """Streams the arrays of one optimizer through the window.

    Parameters
    ----------
    store
        An allocated store.
    optimizer
        Which of its optimizers.
    window
        The slots; shared with the other streams of the rank, which sweep at other times.
    """

    def __init__(self, store: TierStore, optimizer: OptimizerLayout, window: Window) -> None:
        self._store = store
        self._optimizer = optimizer
        self._window = window
        self._set_nbytes = sum(form.tile_nbytes for form in optimizer.formats.values())
        self._ahead: _Sweep | None = None

    def prefetch(self) -> None:
        """Start reading the first tiles of the next sweep into the window, and return.

        The next `sweep` of this stream goes on from there. Whoever wants to use the window for
        something else calls `drop` first.
        """
        if self._ahead is not None:
            return
        self._ahead = _Sweep(self._store, self._optimizer, self._window)
        try:
            self._ahead.take_up_all()
        except BaseException as error:
            self.drop()
            # The sweep will meet the same error, where it belongs.
            if not isinstance(error, TierStoreError):
                raise

    def drop(self) -> None:
        """Forget what `prefetch` has read, and whatever error it met.

        Raises
        ------
        TransferTimeoutError
            A read is still on its way, and so the window can't be used.
        """
        if self._ahead is not None:
            self._ahead.drain()
            self._ahead = None

    def sweep(
        self,
        visit: Callable[[TileViews], None],
        *,
        order: Iterable[int] | None = None,
        reads: bool = True,
        writes: bool = True,
    ) -> SweepMetrics:
        """Visit every tile once; return when every transfer has settled.

        Parameters
        ----------
        visit
            Called in this thread with each tile when it is in its slot. On a CUDA device it
            queues its work on the current stream.
        order
            A permutation of the tile numbers.
        reads
            Whether tiles are read first; if not, slots start as zeros.
        writes
            Whether tiles are written afterwards; the store must be in a generation then.

        Raises
        ------
        TierStoreError
            The first error of any transfer, after all transfers have come to an end. The store
            then needs a rollback.
        TransferTimeoutError
            A transfer did not come back within the configured time.
        """
        run = self._take_ahead() if order is None and reads and writes else None
        if run is None:
            self.drop()
            run = _Sweep(self._store, self._optimizer, self._window, order, reads, writes)
        started = time.perf_counter()
        try:
            run.to_the_end(visit)
        except BaseException as error:
            if writes:
                self._store.fail(error)
            try:
                run.drain()
            except TransferTimeoutError:
                # What is still on its way may yet fill a slot.
                self._ahead = run
            raise
        metrics = run.metrics
        metrics.mode = self._store.mode
        metrics.wall_s = time.perf_counter() - started
        metrics.read_nbytes = metrics.tiles * self._set_nbytes if reads else 0
        metrics.written_nbytes = metrics.tiles * self._set_nbytes if writes else 0
        return metrics

    def _take_ahead(self) -> _Sweep | None:
        """The sweep that `prefetch` began, if its tiles are those of the last commit still."""
        run = self._ahead
        if run is None or run.begun or run.commit is not self._store.committed:
            return None
        self._ahead = None
        return run


class _Sweep:
    """The loop of one sweep: starts what the schedule allows, then waits for what comes first."""

    def __init__(
        self,
        store: TierStore,
        optimizer: OptimizerLayout,
        window: Window,
        order: Iterable[int] | None = None,
        reads: bool = True,
        writes: bool = True,
    ) -> None:
        self._store, self._optimizer, self._window = store, optimizer, window
        self._reads, self._writes = reads, writes
        self._device = store.device
        # What its tiles are of, and whether it is more than a prefetch.
        self.commit = store.committed
        self.begun = False
        self._schedule = SweepSchedule(
            store.order(optimizer.name) if order is None else order,
            slots=len(window.slots),
            read_sets=store.read_sets,
            write_sets=store.write_sets,
            reads=reads,
            writes=writes,
        )
        # I/O threads report here; only this thread touches the schedule.
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Of the transfers that are on their way, in the order in which they began.
        self._deadlines: dict[tuple[str, int], float] = {}
        self._arrivals: dict[int, Events] = {}
        self._slots: dict[int, Slot] = {}
        self._in_window = 0
        self.metrics = SweepMetrics()

    def to_the_end(self, visit: Callable[[TileViews], None]) -> None:
        self.begun = True
        # A transfer has a deadline until it has settled: a read may still fail its check.
        while not self._schedule.done or self._deadlines:
            self.take_up_all()
            if (place := self._schedule.next_visit()) is not None:
                self._visit_tile(place, visit)
                self._handle_what_came()
            elif not self._schedule.done or self._deadlines:
                self._wait()

    def take_up_all(self) -> None:
        """Start reading as many tiles as there are slots for."""
        while (place := self._schedule.next_read()) is not None:
            self._take_up(place)

    def _take_up(self, place: Place) -> None:
        self._in_window += 1
        self.metrics.peak_tiles = max(self.metrics.peak_tiles, self._in_window)
        tile = place.tile
        slot = self._slots[tile] = self._window.slots[place.slot]
        if not self._reads:
            return
        self._deadlines["read", tile] = self._deadline()
        views = slot.views(self._optimizer)
        transfer = self._store.read_tile(self._optimizer.name, tile, views, after=slot.free_after)
        transfer.device_done.add_done_callback(partial(self._report, self._arrived, tile))
        transfer.settled.add_done_callback(partial(self._report, self._checked, tile))

    def _arrived(self, tile: int, future: Future[Events]) -> None:
        self._arrivals[tile] = future.result()
        self._schedule.arrived(tile)

    def _checked(self, tile: int, future: Future[None]) -> None:
        del self._deadlines["read", tile]
        future.result()

    def _visit_tile(self, place: Place, visit: Callable[[TileViews], None]) -> None:
        tile, slot = place.tile, self._slots[place.tile]
        views = slot.views(self._optimizer)
        grid = self._optimizer.layout.tile(tile)
        self._device.wait(self._arrivals.pop(tile) if self._reads else slot.free_after)
        started = time.perf_counter()
        if not self._reads:
            for view in views.values():
                view.zero_()
        if grid.numel == self._optimizer.layout.tile_numel:
            visit(TileViews(grid, views))
        else:
            visit(TileViews(grid, {name: view[: grid.numel] for name, view in views.items()}))
        self.metrics.update_s += time.perf_counter() - started
        self.metrics.tiles += 1
        slot.free_after = self._device.mark()
        if not self._writes:
            self._release(tile)
            return
        self._deadlines["write", tile] = self._deadline()
        transfer = self._store.write_tile(self._optimizer.name, tile, views, after=slot.free_after)
        transfer.device_done.add_done_callback(partial(self._report, self._left, tile))
        transfer.settled.add_done_callback(partial(self._report, self._settled, tile))

    def _left(self, tile: int, future: Future[Events]) -> None:
        self._slots[tile].free_after = future.result()
        self._release(tile)

    def _release(self, tile: int) -> None:
        del self._slots[tile]
        self._in_window -= 1
        self._schedule.released(tile)

    def _settled(self, tile: int, future: Future[None]) -> None:
        del self._deadlines["write", tile]
        future.result()
        self._schedule.settled(tile)

    def _deadline(self) -> float:
        return time.monotonic() + self._store.config.timeout_s

    def _report(self, handle: Callable[[int, Future], None], tile: int, future: Future) -> None:  # type: ignore[type-arg]
        # Refers to the tile by number: see `TierStore` for why callbacks do not refer to their
        # transfer.
        self._done.put(partial(handle, tile, future))

    def _handle_what_came(self) -> None:
        while True:
            try:
                handle = self._done.get_nowait()
            except queue.Empty:
                return
            handle()

    def _wait(self) -> None:
        """Wait for one report, and count the wait to what the sweep lacks."""
        started = time.monotonic()
        # A report may be about to come of a transfer that has ended: then there is no deadline.
        soonest = next(iter(self._deadlines.values()), self._deadline())
        try:
            handle = self._done.get(timeout=max(0.0, soonest - started))
        except queue.Empty:
            raise TransferTimeoutError(
                f"{self._store}: a transfer of {self._optimizer.name} did not come back within "
                f"{self._store.config.timeout_s:g} s; the drive or file system hangs"
            ) from None
        waited = time.monotonic() - started
        if self._schedule.waits_for_reads:
            self.metrics.stall_read_s += waited
        else:
            self.metrics.stall_write_s += waited
        handle()

    def drain(self) -> None:
        """Wait until no transfer touches the window, and forget what they report."""
        self._store.settle()
        # Settled reads may still be on their way from a host block to a slot.
        self._device.synchronize()
        for slot in self._window.slots:
            slot.free_after = ()
        # Reports refer to this sweep and would keep it until a garbage collection.
        self._done = queue.SimpleQueue()
