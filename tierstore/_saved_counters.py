"""The step counters that a saved rank holds for each shard and group of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tierstore.errors import CorruptError

if TYPE_CHECKING:
    from tierstore.copies import SourceId
    from tierstore.saved import SavedStore

__all__ = ["group_steps_of", "scalars_of"]


def scalars_of(saved: SavedStore, source: SourceId) -> list[dict[str, float]]:
    """The scalars of each shard of an optimizer, by name.

    Raises
    ------
    CorruptError
        The rank's counters are not such.
    """
    layout = saved.ranks[source.rank].optimizers[source.optimizer].layout
    rows: list[dict[str, float]] = [{} for _ in layout.shards]
    for name, runs in _runs(saved, source).items():
        if sum(length for _, length in runs) != len(rows):
            raise CorruptError(f"{saved}: {source} has not one {name} for each shard")
        values = (value for value, length in runs for _ in range(length))
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def group_steps_of(saved: SavedStore, source: SourceId) -> list[int]:
    """The steps that the optimizer's groups have counted, of those that count at all.

    Raises
    ------
    CorruptError
        The rank's counters are not such.
    """
    try:
        groups = [dict(entry) for entry in _counters(saved, source)["groups"]]
        # A group of which the rank held nothing may not have counted.
        return [int(entry["step"]) for entry in groups if "step" in entry]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            f"{saved}: the counters of {source} have no groups: {error!r}"
        ) from error


def _counters(saved: SavedStore, source: SourceId) -> Mapping[str, Any]:
    found = saved.ranks[source.rank].commit.state.get(source.optimizer)
    if not isinstance(found, dict):
        raise CorruptError(f"{saved} has no counters of {source}")
    return found


def _runs(saved: SavedStore, source: SourceId) -> dict[str, list[tuple[float, int]]]:
    counters = _counters(saved, source)
    try:
        return {
            str(name): [(float(value), _length(length)) for value, length in runs]
            for name, runs in counters["scalars"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(
            f"{saved}: the counters of {source} are no scalars: {error!r}"
        ) from error


def _length(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of shards")
    return value
