"""Tier name to class, by entry point, imported only when asked for."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from tierstore.errors import BackendUnavailableError, ConfigError

if TYPE_CHECKING:
    from tierstore.store import TierStore

__all__ = ["ENTRY_POINT_GROUP", "available_tiers", "tier_class"]

ENTRY_POINT_GROUP = "tierstore.backends"


def available_tiers() -> dict[str, EntryPoint]:
    """Every registered tier by name; nothing is imported."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def tier_class(name: str) -> type[TierStore]:
    """The class that implements a tier.

    Raises
    ------
    ConfigError
        No tier of that name is registered.
    BackendUnavailableError
        It is registered, and importing it failed.
    """
    tiers = available_tiers()
    if name not in tiers:
        known = ", ".join(sorted(tiers)) or "none: is tierstore installed?"
        raise ConfigError(f"there is no tier {name!r} in this installation (registered: {known})")
    try:
        loaded: type[TierStore] = tiers[name].load()
    except ImportError as error:
        raise BackendUnavailableError(f"tier {name!r} can't be imported: {error}") from error
    return loaded
