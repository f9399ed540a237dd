"""A small, deterministic choice of cases in which every pair of values occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairwise(dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Choose rows so that every allowed pair of values of two dimensions is in one of them.

    Parameters
    ----------
    dimensions
        The values of each dimension, in order of preference.
    allowed
        Says whether a row, which may still lack dimensions, breaks no rule. A partial row that
        is not allowed must stay so when dimensions are added.

    Returns
    -------
    list of dict
        The rows; the same every time.
    """
    uncovered = feasible_pairs(dimensions, allowed)
    rows: list[Row] = []
    while uncovered:
        row = _complete(dict(uncovered[0]), dimensions, allowed, set(uncovered), rows)
        if row is None:
            raise ValueError(f"no row can hold {uncovered[0]}")
        rows.append(row)
        uncovered = [pair for pair in uncovered if not _holds(row, pair)]
    return rows


def feasible_pairs(
    dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]
) -> list[Pair]:
    """Return every pair of values that at least one allowed row holds."""
    return [
        ((first, a), (second, b))
        for first, second in combinations(dimensions, 2)
        for a in dimensions[first]
        for b in dimensions[second]
        if _complete({first: a, second: b}, dimensions, allowed, set(), []) is not None
    ]


def _complete(
    row: Row,
    dimensions: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    wanted: set[Pair],
    earlier: list[Row],
) -> Row | None:
    """Fill the missing dimensions, each with the value that covers most wanted pairs."""
    if not allowed(row):
        return None
    name = next((name for name in dimensions if name not in row), None)
    if name is None:
        return row

    def merit(value: Any) -> tuple[int, int]:
        grown = row | {name: value}
        known = [key for key in dimensions if key in grown]
        pairs = [((a, grown[a]), (b, grown[b])) for a, b in combinations(known, 2)]
        # Where the gain is equal the value that was used least keeps the rows varied.
        return sum(pair in wanted for pair in pairs), -sum(old[name] == value for old in earlier)

    for value in sorted(dimensions[name], key=merit, reverse=True):
        completed = _complete(row | {name: value}, dimensions, allowed, wanted, earlier)
        if completed is not None:
            return completed
    return None


def _holds(row: Row, pair: Pair) -> bool:
    return all(row[name] == value for name, value in pair)
