"""Stores that behave badly on purpose."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tierstore.records import ArrayKey
from tierstore.store import TierStore
from tierstore.transfer import Transfer

if TYPE_CHECKING:
    import torch

    from tierstore.device import Events

__all__ = ["delayed"]


def delayed(
    store_class: type[TierStore], *, seed: int = 0, longest_s: float = 0.003
) -> type[TierStore]:
    """A tier whose transfers start late, end late, and overtake each other.

    The guard against races: whoever reads a slot before its tile has arrived, or reuses one before
    its tile has left, gets wrong numbers with this store much sooner than with a fast one.

    Parameters
    ----------
    store_class
        The tier to slow down.
    seed
        Of the random delays.
    longest_s
        The longest delay before and after each transfer.

    Returns
    -------
    type
        A subclass of `store_class`.
    """

    class DelayStore(store_class):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._random = random.Random(seed)
            self._random_lock = threading.Lock()
            self._late = ThreadPoolExecutor(8, thread_name_prefix="tierstore-late")

        def _read(self, key: ArrayKey, tile: int, out: torch.Tensor, after: Events) -> Transfer:
            return self._start_late(lambda: super(DelayStore, self)._read(key, tile, out, after))

        def _write(self, key: ArrayKey, tile: int, src: torch.Tensor, after: Events) -> Transfer:
            return self._start_late(lambda: super(DelayStore, self)._write(key, tile, src, after))

        # Arrays of one tile overtake each other, also where the tier has a way for all at once.
        _read_tile = TierStore._read_tile
        _write_tile = TierStore._write_tile

        def _start_late(self, start: Callable[[], Transfer]) -> Transfer:
            late = Transfer()
            self._late.submit(self._carry_late, start, late)
            return late

        def _carry_late(self, start: Callable[[], Transfer], late: Transfer) -> None:
            self._dawdle()
            try:
                transfer = start()
                event = transfer.device_done.result()
                self._dawdle()
                late.device_done.set_result(event)
                transfer.settled.result()
                del transfer
            except BaseException as error:  # the transfer reports it
                late.fail(error)
                return
            self._dawdle()
            late.settled.set_result(None)

        def _dawdle(self) -> None:
            with self._random_lock:
                delay_s = self._random.random() * longest_s
            time.sleep(delay_s)

        def _close(self, discard: bool) -> None:
            self._late.shutdown()
            super()._close(discard)

    return DelayStore
