"""Look into a store with plain zarr: no tierstore, and never more than one tile in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from rich.tree import Tree

CURRENT = "rank-00000/current/opt-0"  # the finished generation of the first rank's optimizer


def tree(store: Path) -> Tree:
    """Return the groups and arrays below `store`, with type, shape, chunk and tile of each."""
    view = Tree(store.name)
    _add_members(view, zarr.open_group(store, mode="r"), store)
    return view


def _add_members(view: Tree, group: zarr.Group, path: Path) -> None:
    for name, member in sorted(group.members()):
        if (path / name).is_symlink():
            view.add(f"{name} -> {(path / name).readlink()}")
        elif isinstance(member, zarr.Group):
            about = member.attrs.get("tierstore")
            said = about if isinstance(about, dict) else {}
            words = [f"{key} {said[key]}" for key in ("generation", "state", "step") if key in said]
            _add_members(view.add(" ".join([name, *words])), member, path / name)
        else:
            # zarr calls our chunk a shard, and our tile the chunk within it.
            (chunk,), (tile,) = member.shards or member.chunks, member.chunks
            shape = f"({member.shape[0]},)"
            view.add(f"{name:<10} {member.dtype} {shape} chunk {chunk} tile {tile}")


def current_array(store: Path, name: str) -> zarr.Array[Any]:
    """Open one array of the generation that holds the last step."""
    array = zarr.open(store, mode="r", path=f"{CURRENT}/{name}")
    if not isinstance(array, zarr.Array):
        raise TypeError(f"{store}/{CURRENT}/{name} is not an array")
    return array


def tiles(array: zarr.Array[Any]) -> Iterator[NDArray[np.float64]]:
    """Yield the array tile by tile; zarr reads that part of the file only, and checks its crc."""
    for start in range(0, array.shape[0], array.chunks[0]):
        yield np.asarray(array[start : start + array.chunks[0]], dtype=np.float64)


def l2_norm(parts: Iterator[NDArray[np.float64]]) -> float:
    """Return the root of the sum of squares (which padding, being zero, does not change)."""
    return math.sqrt(math.fsum(float(np.dot(part, part)) for part in parts))
