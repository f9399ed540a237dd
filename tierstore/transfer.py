"""A tile on its way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tierstore.device import Events

__all__ = ["Transfer", "together"]


class Transfer:
    """One tile, of one array or of all arrays of an optimizer, on its way.

    Attributes
    ----------
    device_done
        Resolves, to events, when the device's end is in order: after a read, what waits for them
        sees the tile; after a write, what waits for them may reuse the tensors.
    settled
        Resolves when the bytes are on the tier (write) or checked (read), or to the error.
    """

    __slots__ = ("device_done", "settled")

    def __init__(self) -> None:
        self.device_done: Future[Events] = Future()
        self.settled: Future[None] = Future()

    def fail(self, error: BaseException) -> None:
        """Resolve both ends to `error`."""
        if not self.device_done.done():
            self.device_done.set_exception(error)
        self.settled.set_exception(error)


def together(parts: Sequence[Transfer]) -> Transfer:
    """One transfer that ends when several have ended, and fails when one of them has failed."""
    return _Together(parts).transfer


class _Together:
    def __init__(self, parts: Sequence[Transfer]) -> None:
        self.transfer = Transfer()
        self._lock = threading.Lock()
        self._events: list[torch.cuda.Event] = []
        self._on_device = self._unsettled = len(parts)
        self._error: BaseException | None = None
        for part in parts:
            part.device_done.add_done_callback(self._device_done)
            part.settled.add_done_callback(self._settled)

    def _device_done(self, future: Future[Events]) -> None:
        error = future.exception()
        with self._lock:
            self._on_device -= 1
            last = not self._on_device
            if error is None:
                self._events += future.result()
            else:
                self._error = self._error or error
        if last:
            if self._error is None:
                self.transfer.device_done.set_result(tuple(self._events))
            else:
                self.transfer.device_done.set_exception(self._error)

    def _settled(self, future: Future[None]) -> None:
        error = future.exception()
        with self._lock:
            self._unsettled -= 1
            last = not self._unsettled
            self._error = self._error or error
        if last:
            if self._error is None:
                self.transfer.settled.set_result(None)
            else:
                self.transfer.settled.set_exception(self._error)
