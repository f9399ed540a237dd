"""What numpy's basic indexing asks of an array that lies elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

__all__ = ["block_of", "strides_of"]


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one to the next along each axis, row by row."""
    return tuple(accumulate(shape[:0:-1], int.__mul__, initial=1))[::-1] if shape else ()


def block_of(
    index: Any, shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    """Offset and shape of the block that an index needs, and the index into that block.

    Raises
    ------
    IndexError
        It is no basic index, or out of bounds.
    """
    asked = index if isinstance(index, tuple) else (index,)
    gaps = [place for place, entry in enumerate(asked) if entry is Ellipsis]
    gap = gaps[0] if gaps else len(asked)
    rest = (slice(None),) * (len(shape) - len(asked) + len(gaps))
    asked = asked[:gap] + rest + asked[gap + len(gaps) :]
    if len(asked) != len(shape) or len(gaps) > 1:
        raise IndexError(f"{index!r} is not an index of an array of shape {tuple(shape)}")
    offset, sizes, then = [], [], []
    for entry, length in zip(asked, shape, strict=True):
        if isinstance(entry, slice):
            found = range(*entry.indices(length))
            ends = sorted((found[0], found[-1])) if found else (0, -1)
            low, high = ends[0], ends[1] + 1
            step: Any = slice(None, None, found.step)
        else:
            if isinstance(entry, bool) or not isinstance(entry, int | np.integer):
                raise IndexError(f"{entry!r}: only integers, slices and ... can be an index here")
            low = int(entry) + (length if entry < 0 else 0)
            if not 0 <= low < length:
                raise IndexError(f"index {entry} is out of bounds for an axis of {length}")
            high, step = low + 1, 0
        offset.append(low)
        sizes.append(high - low)
        then.append(step)
    return tuple(offset), tuple(sizes), tuple(then)
