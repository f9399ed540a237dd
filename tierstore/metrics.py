"""What a sweep did, in numbers that a log, a test or a script can use."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GIB", "SweepMetrics", "readable"]

GIB = 2**30


def readable(nbytes: float) -> str:
    """A number of bytes for people, in units of 1024.

    Examples
    --------
    >>> readable(6291456), readable(3 * 2**30), readable(100)
    ('6.00 MiB', '3.00 GiB', '100 B')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


@dataclass(slots=True, kw_only=True)
class SweepMetrics:
    """Counts and times of one sweep, or the sum of several.

    Parameters
    ----------
    tiles
        Tiles visited.
    read_nbytes, written_nbytes
        Bytes of elements that came from and went to the tier, without checksums.
    wall_s
        Seconds from the first transfer to the last one settled, and through the commit.
    stall_read_s
        Seconds in which the sweep had nothing to do but wait for tiles to arrive.
    update_s
        Seconds of the host in the update: where the update is queued on a device, the time to
        queue it.
    stall_write_s
        Seconds in which it had nothing to do but wait for a slot or block to be written out.
    commit_s
        Seconds of making the generation durable.
    peak_tiles
        Most tiles that were in slots at once.
    mode
        How bytes really moved, as `Probe.mode` has it.
    """

    tiles: int = 0
    read_nbytes: int = 0
    written_nbytes: int = 0
    wall_s: float = 0.0
    stall_read_s: float = 0.0
    update_s: float = 0.0
    stall_write_s: float = 0.0
    commit_s: float = 0.0
    peak_tiles: int = 0
    mode: str = ""

    def add(self, other: SweepMetrics) -> None:
        """Take in another sweep of the same step."""
        self.tiles += other.tiles
        self.read_nbytes += other.read_nbytes
        self.written_nbytes += other.written_nbytes
        self.wall_s += other.wall_s
        self.stall_read_s += other.stall_read_s
        self.update_s += other.update_s
        self.stall_write_s += other.stall_write_s
        self.commit_s += other.commit_s
        self.peak_tiles = max(self.peak_tiles, other.peak_tiles)
        self.mode = other.mode

    def line(self) -> str:
        """One line for a log: GiB is 2**30 bytes, rates are over the wall time of the step."""
        seconds = max(self.wall_s, 1e-9)
        read, written = self.read_nbytes / GIB, self.written_nbytes / GIB
        return (
            f"mode={self.mode} tiles={self.tiles} "
            f"read={read:.3f}GiB@{read / seconds:.2f}GiB/s "
            f"write={written:.3f}GiB@{written / seconds:.2f}GiB/s "
            f"stall_read={self.stall_read_s:.3f}s update={self.update_s:.3f}s "
            f"stall_write={self.stall_write_s:.3f}s commit={self.commit_s:.3f}s "
            f"wall={self.wall_s:.3f}s peak_window={self.peak_tiles} tiles"
        )
