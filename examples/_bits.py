"""Equality of tensors to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

Tensors = Mapping[str, torch.Tensor]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a CPU tensor: a NaN equals itself here, and -0.0 is not 0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def nbytes(tensors: Tensors) -> int:
    """Return how many bytes a comparison of `tensors` looks at."""
    return sum(tensor.nbytes for tensor in tensors.values())


def differing(left: Tensors, right: Tensors) -> list[str]:
    """Return the names whose type, shape or any bit differs, or that only one side has."""
    return sorted(
        name
        for name in left.keys() | right.keys()
        if name not in left
        or name not in right
        or left[name].dtype != right[name].dtype
        or left[name].shape != right[name].shape
        or raw_bytes(left[name]) != raw_bytes(right[name])
    )


def sha256(tensors: Tensors) -> str:
    """Return one hash over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()
