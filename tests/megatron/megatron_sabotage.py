"""Breaks the stream on purpose, beneath all of its checks, to prove that the comparison sees it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from functools import partial
from unittest import mock

import torch

from tierstore.device import Events
from tierstore.records import ArrayKey, OptimizerLayout
from tierstore.registry import tier_class
from tierstore.store import TierStore
from tierstore.testing.faults import delayed
from tierstore.transfer import Transfer


class _Saboteur:
    """Stands between a store's checks and its transfers.

    Parameters
    ----------
    store
        The store; its array of the first moments has two tiles or more.
    """

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._real_read, self._real_write = store._read, store._write
        self._kept: list[torch.Tensor] = []
        store._read = self.read  # type: ignore[method-assign]
        store._write = self.write  # type: ignore[method-assign]
        # Not the way for all arrays at once, which a tier may have.
        store._read_tile = partial(TierStore._read_tile, store)  # type: ignore[method-assign]
        store._write_tile = partial(TierStore._write_tile, store)  # type: ignore[method-assign]

    def read(self, key: ArrayKey, tile: int, out: torch.Tensor, after: Events) -> Transfer:
        return self._real_read(key, tile, out, after)

    def write(self, key: ArrayKey, tile: int, src: torch.Tensor, after: Events) -> Transfer:
        return self._real_write(key, tile, src, after)

    def _done(self) -> Transfer:
        transfer = Transfer()
        transfer.device_done.set_result(self._store.device.mark())
        transfer.settled.set_result(None)
        return transfer


class _SwapTiles(_Saboteur):
    """Reads the first two tiles in each other's place."""

    def read(self, key: ArrayKey, tile: int, out: torch.Tensor, after: Events) -> Transfer:
        swapped = {0: 1, 1: 0}.get(tile, tile) if key.name == "exp_avg" else tile
        return self._real_read(key, swapped, out, after)


class _SkipTile(_Saboteur):
    """Says that a tile was written, and does not write it: an older, healthy one stays."""

    def write(self, key: ArrayKey, tile: int, src: torch.Tensor, after: Events) -> Transfer:
        committed = self._store.committed
        if key.name == "exp_avg" and tile == 1 and committed is not None and committed.step > 3:
            return self._done()
        return self._real_write(key, tile, src, after)


class _NeverWriteTile(_Saboteur):
    """The same from the first step on: what is read may never have been written at all."""

    def write(self, key: ArrayKey, tile: int, src: torch.Tensor, after: Events) -> Transfer:
        if key.name == "exp_avg" and tile == 1 and self._store.committed is not None:
            return self._done()
        return self._real_write(key, tile, src, after)


class _ReadEarly(_Saboteur):
    """Hands out a tile before it was filled: what the slot held before is read."""

    def read(self, key: ArrayKey, tile: int, out: torch.Tensor, after: Events) -> Transfer:
        if key.name == "exp_avg" and tile == 1:
            return self._done()
        return self._real_read(key, tile, out, after)


class _PerturbMoment(_Saboteur):
    """Changes one element of one moment a little, in every step."""

    def write(self, key: ArrayKey, tile: int, src: torch.Tensor, after: Events) -> Transfer:
        if key.name == "exp_avg" and tile == 0:
            changed = src.clone()
            changed[0] += changed.abs().max() * 1e-3 + 1e-12
            self._kept.append(changed)  # until it is written
            src = changed
        return self._real_write(key, tile, src, after)


KINDS: dict[str, type[_Saboteur]] = {
    "swap_tiles": _SwapTiles,
    "skip_tile": _SkipTile,
    "never_write_tile": _NeverWriteTile,
    "read_early": _ReadEarly,
    "perturb_moment": _PerturbMoment,
}


@contextlib.contextmanager
def disturbed(sabotage: str | None, *, delays: bool) -> Iterator[None]:
    """Slow down or break every store that is attached inside the block, or leave it alone.

    Parameters
    ----------
    sabotage
        One of `KINDS`, or None.
    delays
        Whether transfers are late by random times.
    """
    # By its full name: in the package the function of this name hides the module.
    attach_module = importlib.import_module("tierstore.adapters.megatron.attach")
    allocate = TierStore.allocate

    def late_tier_class(name: str) -> type[TierStore]:
        return delayed(tier_class(name))

    def allocate_and_break(self: TierStore, optimizers: Sequence[OptimizerLayout]) -> None:
        allocate(self, optimizers)
        KINDS[str(sabotage)](self)

    with contextlib.ExitStack() as stack:
        if delays:
            stack.enter_context(mock.patch.object(attach_module, "tier_class", late_tier_class))
        if sabotage is not None:
            stack.enter_context(mock.patch.object(TierStore, "allocate", allocate_and_break))
        yield
