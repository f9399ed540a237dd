"""Which tile may do what next: the small state machine behind a sweep. Pure: no I/O, no threads.

A tile passes through ``waiting -> reading -> ready -> writing -> done``. It takes its slot first,
and with it one read set (host blocks for one tile of every array); the read set is free when the
tile has arrived, the slot when the event of its copy out has been recorded, and the write set when
its bytes are on the tier. Nothing ever waits while holding what another one needs: a tile that has
its read set needs nothing more to arrive, one that has its write set nothing more to be written,
so one slot and one set each way are enough to finish.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Place", "SweepSchedule"]


@dataclass(frozen=True, slots=True)
class Place:
    """A tile and the slot that it has."""

    tile: int
    slot: int


class SweepSchedule:
    """Hands out slots, read sets and write sets during one sweep.

    Parameters
    ----------
    tiles
        Tile numbers in the order in which they are taken up; any permutation.
    slots, read_sets, write_sets
        How many of each there are, at least 1.
    reads, writes
        Whether tiles are read before the visit, and written after it.
    """

    def __init__(
        self,
        tiles: Iterable[int],
        *,
        slots: int,
        read_sets: int,
        write_sets: int,
        reads: bool = True,
        writes: bool = True,
    ) -> None:
        self._waiting = deque(tiles)
        self._free_slots = deque(range(slots))
        self._free_reads = read_sets
        self._free_writes = write_sets
        self._reads, self._writes = reads, writes
        self._reading: dict[int, Place] = {}
        self._ready: deque[Place] = deque()
        self._holding: dict[int, Place] = {}
        self._settling: set[int] = set()

    @property
    def done(self) -> bool:
        """Whether every tile has been through."""
        return not (
            self._waiting or self._reading or self._ready or self._holding or self._settling
        )

    @property
    def waits_for_reads(self) -> bool:
        """Whether what is missing for the next visit is a tile that is being read."""
        return bool(self._reading) and not self._ready

    def next_read(self) -> Place | None:
        """Give the next tile a slot and a read set, or None if there is none now."""
        if not self._waiting or not self._free_slots or (self._reads and not self._free_reads):
            return None
        place = Place(self._waiting.popleft(), self._free_slots.popleft())
        if self._reads:
            self._free_reads -= 1
            self._reading[place.tile] = place
        else:
            self._ready.append(place)
        return place

    def arrived(self, tile: int) -> None:
        """Note that all arrays of the tile are in its slot; its read set is free."""
        self._ready.append(self._reading.pop(tile))
        self._free_reads += 1

    def next_visit(self) -> Place | None:
        """Give the next tile that has arrived a write set, or None if there is none now."""
        if not self._ready or (self._writes and not self._free_writes):
            return None
        place = self._ready.popleft()
        self._holding[place.tile] = place
        if self._writes:
            self._free_writes -= 1
            self._settling.add(place.tile)
        return place

    def released(self, tile: int) -> None:
        """Note that the event after which the tile's slot may be reused has been recorded."""
        self._free_slots.append(self._holding.pop(tile).slot)

    def settled(self, tile: int) -> None:
        """Note that all arrays of the tile are on the tier; its write set is free."""
        self._settling.remove(tile)
        self._free_writes += 1
