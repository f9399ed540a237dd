"""Where the shards of a ``DistributedOptimizer`` lie: DDP buckets to a state layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierstore.binding import BoundShard
from tierstore.layout import Shard, StateLayout

if TYPE_CHECKING:
    import torch

    from tierstore.adapters.megatron.names import ParameterName
    from tierstore.config import TierConfig

__all__ = ["OwnedShard", "lay_out", "owned_shards"]

_CHUNKS_PER_DIRECTORY = 8


@dataclass(frozen=True, slots=True)
class OwnedShard:
    """A shard, the model parameter it is part of, and the tensors it is bound to."""

    parameter: torch.Tensor
    shard: Shard
    bound: BoundShard


def owned_shards(
    optimizer: Any, names: Mapping[int, ParameterName]
) -> tuple[list[OwnedShard], int]:
    """All that this rank owns of an optimizer, in buffer order.

    The array is the image of the rank's part of every bucket, one after the other, padding
    included, so that a tile corresponds to flat slices of the buckets' parameter and gradient
    data.

    Returns
    -------
    list of OwnedShard
        Sorted by their place in the array.
    int
        Length of the array in elements.
    """
    mains = _main_params(optimizer)
    owned: list[OwnedShard] = []
    uses: Counter[str] = Counter()
    start = 0
    for bucket, ranges in _buckets(optimizer):
        weights = bucket.param_data.view(-1)
        for parameter, parameter_ranges in ranges["param_map"].items():
            local, whole = parameter_ranges["gbuf_local"], parameter_ranges["param"]
            in_bucket = parameter_ranges["gbuf_world_in_bucket"]
            named = names[id(parameter)]
            main = mains[parameter]
            # Two parameters of a rank may stand for one global tensor (copies of an embedding).
            uses[named.name] += 1
            number = uses[named.name]
            shard = Shard(
                name=named.name if number == 1 else f"{named.name}#{number}",
                numel=local.size,
                array_start=start + local.start,
                param_start=whole.start,
                local_shape=tuple(parameter.shape),
                weight_dtype=str(parameter.dtype).removeprefix("torch."),
                pieces=named.pieces,
            )
            weight = weights[in_bucket.start : in_bucket.end].detach()
            # An fp32 parameter has no copy: what the optimizer holds is a view of the weight.
            is_main = main.data_ptr() == weight.data_ptr()
            owned.append(
                OwnedShard(
                    parameter,
                    shard,
                    BoundShard(main=main, weight=weight, weight_is_main=is_main),
                )
            )
        start += bucket.grad_data.numel() // optimizer.data_parallel_group.size()
    owned.sort(key=lambda entry: entry.shard.array_start)
    return owned, start


def lay_out(owned: list[OwnedShard], numel: int, config: TierConfig) -> StateLayout:
    """The layout of these shards on the configured grid."""
    n_directories = len(config.directories)
    return StateLayout.plan(
        [entry.shard for entry in owned],
        numel=numel,
        chunk_numel=config.chunk_numel,
        tile_numel=config.tile_numel,
        # Enough that drives of unequal speed get their shares.
        least_chunks=_CHUNKS_PER_DIRECTORY * n_directories if n_directories > 1 else 1,
    )


def _buckets(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Each bucket and the ranges of what this rank owns in it, in buffer order."""
    for buffer, by_dtype in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        for ranges in by_dtype.values():
            yield from zip(buffer.buckets, ranges, strict=True)


def _main_params(optimizer: Any) -> dict[torch.Tensor, torch.Tensor]:
    """Model parameter to what the inner optimizer holds for this rank's shard of it.

    Not by ``model_param_group_index_map``: its order differs from that of the groups where a
    group has both fp32 and 16-bit parameters.
    """
    mains: dict[torch.Tensor, torch.Tensor] = {}
    for models, shards in (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
    ):
        for model_group, shard_group in zip(models, shards, strict=True):
            mains.update(zip(model_group, shard_group, strict=True))
    return mains
