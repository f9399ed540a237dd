"""What a tier answers when it is asked: abilities, ways, state of earlier runs, frozen files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = ["Capabilities", "FrozenFile", "Offer", "Probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a tier can do beyond reading and writing.

    Parameters
    ----------
    durable
        Committed state outlives the process, and `TierStore.open` finds it again.
    rollback
        An error between `begin` and `commit` leaves the last commit whole.
    freeze
        `TierStore.freeze` keeps the last commit without copying it.
    """

    durable: bool
    rollback: bool
    freeze: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Whether and how a tier can run at a place, found out by trying.

    Parameters
    ----------
    tier, ok, reason
        The tier's name, whether it can run, and if not, why not.
    mode
        How bytes really move: ``direct``, ``buffered``, ``page-locked``, ``pageable``, ...
    details
        Anything worth printing: file system, free bytes.
    """

    tier: str
    ok: bool
    mode: str
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """State of an earlier run that `TierStore.open` could take up.

    Parameters
    ----------
    path
        The rank's directory.
    nonce
        Of the run that made it.
    steps
        Steps of which it holds a whole generation.
    layouts
        `OptimizerLayout.fingerprint` by optimizer.
    problem
        Why it can't be taken up; empty if it can.
    """

    path: Path
    nonce: str
    steps: tuple[int, ...] = ()
    layouts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    problem: str = ""


class FrozenFile(NamedTuple):
    """One file of a frozen generation.

    Parameters
    ----------
    path
        Its place in the generation, which is a zarr group: ``opt-0/main/c/0``.
    source
        The file, which is never a link.
    nbytes
        Its length.
    """

    path: Path
    source: Path
    nbytes: int
