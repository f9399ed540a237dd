"""The window: the only device memory that the optimizer state holds, shared by a rank's chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierstore.zarr_format import BLOCK_NBYTES

if TYPE_CHECKING:
    import torch

    from tierstore.device import Device, Events
    from tierstore.records import OptimizerLayout

__all__ = ["Slot", "Window"]


class Slot:
    """Device memory for one tile of every array of one optimizer.

    Attributes
    ----------
    free_after
        Events after all of which the slot may be overwritten.
    """

    __slots__ = ("_bytes", "_views", "free_after")

    def __init__(self, memory: torch.Tensor) -> None:
        self._bytes = memory
        self._views: dict[str, dict[str, torch.Tensor]] = {}
        self.free_after: Events = ()

    def views(self, optimizer: OptimizerLayout) -> dict[str, torch.Tensor]:
        """One flat tensor of ``tile_numel`` elements per array, side by side in the slot."""
        found = self._views.get(optimizer.name)
        if found is None:
            found = self._views[optimizer.name] = self._cut(optimizer)
        return found

    def _cut(self, optimizer: OptimizerLayout) -> dict[str, torch.Tensor]:
        import torch

        views, start = {}, 0
        for name, form in optimizer.formats.items():
            stop = start + form.tile_nbytes
            views[name] = self._bytes[start:stop].view(getattr(torch, form.dtype))
            start = stop
        return views


class Window:
    """A fixed number of slots, allocated once.

    Parameters
    ----------
    device
        Where the slots are.
    slots
        How many at most; no more than the longest array has tiles.
    optimizers
        Every optimizer of the chain; a slot fits the largest tile of any of them.
    """

    def __init__(self, device: Device, slots: int, optimizers: Sequence[OptimizerLayout]) -> None:
        slots = max(1, min(slots, max(entry.layout.n_tiles for entry in optimizers)))
        slot_nbytes = max(
            sum(form.tile_nbytes for form in entry.formats.values()) for entry in optimizers
        )
        self.nbytes = slots * slot_nbytes
        # One allocation, aligned so that every view in it starts at a whole block.
        memory = device.empty(self.nbytes + BLOCK_NBYTES)
        skip = -memory.data_ptr() % BLOCK_NBYTES
        self.slots = [
            Slot(memory[skip + start : skip + start + slot_nbytes])
            for start in range(0, self.nbytes, slot_nbytes)
        ]
