"""Brings state that was saved on any topology into an attached optimizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tierstore.filling import Filling, fill_from
from tierstore.saved import SavedStore

if TYPE_CHECKING:
    from tierstore.adapters.megatron.tiered import TieredOptimizer
    from tierstore.state import RankState
    from tierstore.store import TierStore
    from tierstore.stream import TileViews

__all__ = ["Loading"]


class Loading:
    """What one rank takes from a saved store; made first on all ranks, and then carried out.

    Parameters
    ----------
    location, options
        See `SavedStore`.
    tiered
        The rank's optimizers.
    store
        Where the state goes.

    Raises
    ------
    LayoutError
        Something is missing there, or of another shape: all of it is listed.
    CorruptError, TransferError, ConfigError
        As `SavedStore`.
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        options: dict[str, Any],
        tiered: Sequence[TieredOptimizer],
        store: TierStore,
    ) -> None:
        identity = store.identity
        self._saved = SavedStore(location, **options)
        self._fillings = {
            entry.name: fill_from(
                self._saved,
                entry.optimizer_layout,
                rank=identity.rank,
                topology=identity.topology,
            )
            for entry in tiered
        }
        self._counters = {
            entry.name: self._fillings[entry.name].counters(entry.n_groups) for entry in tiered
        }
        for entry in tiered:
            entry.require_counters(self._counters[entry.name])
        self.step = self._saved.step

    def carry_out(self, state: RankState) -> None:
        """Write the state, tile by tile, as one generation."""
        visits = {name: _visit(filling) for name, filling in self._fillings.items()}
        ranks = self._saved.ranks
        # What the same rank gave, where there was one.
        job = ranks.get(state.store.identity.rank, ranks[min(ranks)]).commit.job
        state.load(self.step, visits, self._counters, job)


def _visit(filling: Filling) -> Any:
    import torch

    def put(views: TileViews) -> None:
        for name, values in filling.tile(views.tile.index).items():
            found = torch.from_numpy(values)
            views.arrays[name].copy_(found.view(views.arrays[name].dtype))

    return put
