"""What a parameter is called on every topology, and which part of it this rank's tensor is.

Both come from the model's own ``sharded_state_dict``, which Megatron's distributed checkpoints
are made of.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tierstore.layout import Piece

if TYPE_CHECKING:
    import torch

__all__ = ["ParameterName", "name_parameters"]

_logger = logging.getLogger("tierstore.megatron")


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterName:
    """Name and pieces of one parameter, see `Shard`."""

    name: str
    pieces: tuple[Piece, ...]


def name_parameters(model_chunks: Iterable[Any]) -> dict[int, ParameterName]:
    """Name every parameter of a rank's model.

    Parameters
    ----------
    model_chunks
        The DDP-wrapped model chunks, in order.

    Returns
    -------
    dict
        By ``id`` of the parameter. A parameter that the model's ``sharded_state_dict`` does not
        list is called by its place in the module tree and has no pieces.
    """
    names: dict[int, ParameterName] = {}
    unlisted = []
    for index, chunk in enumerate(model_chunks):
        module = chunk
        while hasattr(module, "module"):
            module = module.module
        listed: dict[int, Any] = {}
        if hasattr(module, "sharded_state_dict"):
            for entry in _entries(module.sharded_state_dict()):
                listed[id(entry.data)] = entry
        for name, parameter in module.named_parameters():
            named = _name(listed.get(id(parameter)), parameter)
            if named is None:
                named = ParameterName(f"chunk{index}.{name}", ())
                unlisted.append(named.name)
            names[id(parameter)] = named
    if unlisted:
        _logger.warning(
            "%d parameters have no place in the model's sharded_state_dict (%s%s): their state "
            "can be read back on this topology only",
            len(unlisted),
            ", ".join(unlisted[:3]),
            ", ..." if len(unlisted) > 3 else "",
        )
    return names


def _name(entry: Any, parameter: torch.Tensor) -> ParameterName | None:
    """Name and pieces that an entry gives a parameter; None where it can't be said."""
    pieces = () if entry is None else _pieces(entry, parameter)
    return ParameterName(_global_name(entry.key, pieces), pieces) if pieces else None


def _entries(tree: Any) -> Iterator[Any]:
    """All ShardedTensors and factories of a sharded state dict, however it is nested."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(tree, (ShardedTensor, ShardedTensorFactory)):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _entries(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _entries(value)


def _pieces(entry: Any, parameter: torch.Tensor) -> tuple[Piece, ...]:
    """The blocks of global tensors that a parameter consists of, or none if it can't be said."""
    import torch

    # On a device without memory: a factory may copy, and only shapes and strides are looked at.
    probe = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
    )
    if hasattr(entry, "build_fn"):
        tensors = list(_entries(dataclasses.replace(entry, data=probe).build()))
    else:
        tensors = [dataclasses.replace(entry, data=probe)]
    pieces = []
    for tensor in tensors:
        data = tensor.data
        if data is not probe and data._base is not probe:
            return ()
        ahead = tensor.prepend_axis_num
        pieces.append(
            Piece(
                key=tensor.key,
                global_shape=tuple(tensor.global_shape),
                global_offset=tuple(tensor.global_offset),
                shape=(1,) * ahead + tuple(data.shape),
                local_offset=data.storage_offset(),
                local_strides=(0,) * ahead + tuple(data.stride()),
            )
        )
    return tuple(pieces)


def _global_name(key: str, pieces: tuple[Piece, ...]) -> str:
    """The global tensor's key and, where layers are stacked in it, this one's index.

    `pieces` of one parameter lie in the same layer.
    """
    first = pieces[0]
    stacked = [
        str(offset)
        for offset, stride, length in zip(
            first.global_offset, first.local_strides, first.shape, strict=True
        )
        if stride == 0 and length == 1
    ]
    return f"{key}[{','.join(stacked)}]" if stacked else key
