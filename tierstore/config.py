"""What a user can choose, checked once, when it is chosen."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError
from tierstore.layout import DEFAULT_TILE_NUMEL, MAX_CHUNK_NUMEL, TILE_NUMEL_MULTIPLE

__all__ = ["GDS_MODES", "RECOVERY_MODES", "RESUME_MODES", "TierConfig"]

GDS_MODES = ("auto", "require")
RECOVERY_MODES = ("step", "none")
RESUME_MODES = ("never", "auto", "require")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Where the optimizer state lives and how much memory may carry it.

    Parameters
    ----------
    tier
        Name of a registered tier (``nvme``, ``cpu``, ...).
    directories
        Where a file tier makes its store, one directory for each drive; each run makes a directory
        of its own in each. The first has the whole tree, with links to what lies in the others.
        A single path is taken as well.
    chunk_numel
        Most elements of one chunk (one file), at most 200,000,000.
    tile_numel
        Elements of one tile, a multiple of 1024; small arrays get smaller tiles.
    slots
        Tiles that device memory holds at once, at least 1 (2 to overlap anything).
    host_memory_nbytes
        Cap on the page-locked memory of a rank: what file tiers pass tiles through, or the whole
        state on the cpu tier. None is as much as `slots` tiles in and out need, or the state.
    role
        First part of the names of the directories that this run makes (``actor``, ``critic``).
    recovery
        ``step``: a crash at any point leaves the last finished step whole (needs the space
        twice). ``none``: overwrite in place; a crash in mid-step loses the state.
    resume
        Whether an earlier run's live state in the same place is taken up. ``never``: it is
        reported and left alone. ``auto``: where all ranks hold a common step of one run with the
        same layout. ``require``: refuse to start otherwise.
    io_threads
        Threads that read and, apart from those, threads that write, for each directory.
    gds
        For the gds tier. ``auto``: where GPUDirect Storage is not to be had, kvikio's compatibility
        mode carries the tiles. ``require``: refuse to start then, and say what is missing.
    timeout_s
        Seconds after which a transfer that has not come back is an error.

    Raises
    ------
    ConfigError
        Names every value that is out of range, all at once.
    """

    tier: str
    directories: tuple[Path, ...] = ()
    chunk_numel: int = MAX_CHUNK_NUMEL
    tile_numel: int = DEFAULT_TILE_NUMEL
    slots: int = 4
    host_memory_nbytes: int | None = None
    role: str = "train"
    recovery: str = "step"
    resume: str = "never"
    io_threads: int = 4
    gds: str = "auto"
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        given: Any = self.directories
        paths = (given,) if isinstance(given, str | os.PathLike) else given
        object.__setattr__(self, "directories", tuple(Path(path) for path in paths))
        for name in ("chunk_numel", "tile_numel", "slots", "io_threads"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number")
        wrong = []
        seen: dict[str, Path] = {}
        for directory in self.directories:
            first = seen.setdefault(os.path.realpath(directory), directory)
            if first is not directory:
                wrong.append(f"directories has {first} and {directory}, which are the same one")
        if not TILE_NUMEL_MULTIPLE <= self.chunk_numel <= MAX_CHUNK_NUMEL:
            wrong.append(
                f"chunk_numel is {self.chunk_numel:,}; it must lie between "
                f"{TILE_NUMEL_MULTIPLE:,} and {MAX_CHUNK_NUMEL:,} elements"
            )
        if self.tile_numel < TILE_NUMEL_MULTIPLE or self.tile_numel % TILE_NUMEL_MULTIPLE:
            wrong.append(
                f"tile_numel is {self.tile_numel:,}; it must be a positive multiple of "
                f"{TILE_NUMEL_MULTIPLE:,} elements, so that tiles fill whole 4096-byte blocks"
            )
        if self.slots < 1:
            wrong.append(f"slots is {self.slots}; at least 1 is needed, 4 are usual")
        if self.host_memory_nbytes is not None and self.host_memory_nbytes < 1:
            wrong.append(
                f"host_memory_nbytes is {self.host_memory_nbytes}; leave it out for no cap"
            )
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", str(self.role)):
            wrong.append(
                f"role is {self.role!r}; it becomes part of a directory name: up to 64 letters, "
                "digits, '.', '_' and '-', and a letter or digit first"
            )
        if self.recovery not in RECOVERY_MODES:
            wrong.append(f"recovery is {self.recovery!r}; choose from {', '.join(RECOVERY_MODES)}")
        if self.resume not in RESUME_MODES:
            wrong.append(f"resume is {self.resume!r}; choose from {', '.join(RESUME_MODES)}")
        if self.gds not in GDS_MODES:
            wrong.append(f"gds is {self.gds!r}; choose from {', '.join(GDS_MODES)}")
        if self.io_threads < 1:
            wrong.append(f"io_threads is {self.io_threads}; at least 1 is needed")
        if not 0 < self.timeout_s <= threading.TIMEOUT_MAX:
            wrong.append(
                f"timeout_s is {self.timeout_s}; it must be a positive number of seconds, at most "
                f"{threading.TIMEOUT_MAX:g}"
            )
        if wrong:
            raise ConfigError("; ".join(wrong))
