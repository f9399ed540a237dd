"""Puts global tensors together from the stores of all ranks, by names and pieces alone.

What comes out is compared with the model's own ``sharded_state_dict``, so that what the layouts
say about names and regions is held against what Megatron itself says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from tierstore.layout import Shard, StateLayout


def layout_problems(model: Any, root: Path) -> Iterator[str]:
    """Compare the model's weights with the main params that the stores below `root` hold."""
    torch.distributed.barrier()  # every rank has committed
    whole = assembled(root)
    module = model
    while hasattr(module, "module"):
        module = module.module
    seen = set()
    for entry in _sharded_tensors(module.sharded_state_dict()):
        if entry.data is None or not entry.data.is_floating_point() or "_extra_state" in entry.key:
            continue
        if entry.key not in whole:
            yield f"{entry.key} is in no layout (there are {sorted(whole)})"
            continue
        seen.add(entry.key)
        found = whole[entry.key]
        if found.shape != tuple(entry.global_shape):
            yield f"{entry.key} is {found.shape} in the layouts and {entry.global_shape} here"
            continue
        place = (*entry.global_offset[: entry.prepend_axis_num],)
        place += tuple(
            slice(start, start + length)
            for start, length in zip(
                entry.global_offset[entry.prepend_axis_num :], entry.data.shape, strict=True
            )
        )
        main = torch.from_numpy(found[place].copy()).to(entry.data.dtype)
        if not torch.equal(main, entry.data.detach().cpu()):
            yield f"{entry.key}{list(place)} in the stores is not the weight"
    if not seen:
        yield "the model's sharded_state_dict lists no weight"


def assembled(root: Path, array: str = "main") -> dict[str, np.ndarray[Any, Any]]:
    """All global tensors of one array; an element that no rank holds is NaN."""
    whole: dict[str, np.ndarray[Any, Any]] = {}
    for rank in sorted(root.glob("rank-*")):
        about = json.loads((rank / "zarr.json").read_text())["attributes"]["tierstore"]
        commit = json.loads((rank / "COMMIT" / "zarr.json").read_text())["attributes"]["tierstore"]
        generation = commit["generation"]
        for optimizer in about["optimizers"]:
            layout = StateLayout.from_json(optimizer["layout"])
            path = rank / generation / optimizer["name"] / array
            main = np.asarray(zarr.open_array(path, mode="r")[:])
            for shard in layout.shards:
                _put(whole, shard, main[shard.array_start : shard.array_start + shard.numel])
    return whole


def _put(
    whole: dict[str, np.ndarray[Any, Any]], shard: Shard, values: np.ndarray[Any, Any]
) -> None:
    local = np.full(int(np.prod(shard.local_shape)), np.nan, dtype=np.float32)
    local[shard.param_start : shard.param_start + shard.numel] = values
    for piece in shard.pieces:
        strides = [stride * local.itemsize for stride in piece.local_strides]
        block = np.lib.stride_tricks.as_strided(
            local[piece.local_offset :], piece.shape, strides, writeable=False
        )
        if piece.key not in whole:
            whole[piece.key] = np.full(piece.global_shape, np.nan, dtype=np.float32)
        place = tuple(
            slice(start, start + length)
            for start, length in zip(piece.global_offset, piece.shape, strict=True)
        )
        target = whole[piece.key][place]
        known = ~np.isnan(block)
        if not (np.isnan(target[known]) | (target[known] == block[known])).all():
            raise AssertionError(f"two ranks hold different values of {piece.key}")
        target[known] = block[known]


def _sharded_tensors(tree: Any) -> Iterator[Any]:
    if isinstance(tree, ShardedTensorFactory):
        yield from _sharded_tensors(tree.build())
    elif isinstance(tree, ShardedTensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _sharded_tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _sharded_tensors(value)
