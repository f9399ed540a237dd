"""Sizes that people type, and sums of them that people read."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from statistics import median

from tierstore.update import CUT_NUMEL

__all__ = ["parse_numel", "parse_numels", "readable_numel", "spread"]

_FACTORS = {"K": 10**3, "M": 10**6, "G": 10**9}


def parse_numel(text: str) -> int:
    """A number of elements: ``K``, ``M`` and ``G`` are 10**3, 10**6 and 10**9.

    Rounded up to a multiple of 64, so that parameters end where every optimizer may be cut.

    Examples
    --------
    >>> parse_numel("0.25G"), parse_numel("4m"), parse_numel("1000")
    (250000000, 4000000, 1024)

    Raises
    ------
    ValueError
        Not a positive number with such a unit.
    """
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        numel = Fraction(digits) * (_FACTORS[unit] if unit else 1)
    except (KeyError, ValueError, ZeroDivisionError):
        raise ValueError(f"{text!r} is no number of elements, such as 0.25G or 4M") from None
    if numel <= 0:
        raise ValueError(f"{text!r} is no positive number of elements")
    return -int(-numel // CUT_NUMEL) * CUT_NUMEL


def parse_numels(text: str) -> list[int]:
    """Several numbers of elements with commas in between; see `parse_numel`."""
    return [parse_numel(part.strip()) for part in text.split(",")]


def readable_numel(numel: int) -> str:
    """A number of elements as `parse_numel` reads it, to three decimals.

    Examples
    --------
    >>> readable_numel(250_000_000), readable_numel(1_048_576)
    ('0.25G', '1.049M')
    """
    unit = next(unit for unit in ("G", "M", "K") if numel >= _FACTORS[unit] // 10 or unit == "K")
    return f"{numel / _FACTORS[unit]:.3f}".rstrip("0").rstrip(".") + unit


def spread(values: Sequence[float]) -> str:
    """Median and range of repeated measurements, to about three digits.

    Examples
    --------
    >>> spread([1.0, 3.0, 2.0]), spread([0.25]), spread([99.0, 101.0])
    ('2.00 [1.00..3.00]', '0.250 [0.250..0.250]', '100.0 [99.0..101.0]')
    """
    middle = median(values)
    digits = 3 if middle < 1 else 2 if middle < 10 else 1
    return f"{middle:.{digits}f} [{min(values):.{digits}f}..{max(values):.{digits}f}]"
