"""What is updated: weights, gradients and Adam's hyper-parameters, the same for everybody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ADAM", "OPTIMIZERS", "PARAMETER_NUMEL", "Problem", "make_optimizer", "make_problem"]

PARAMETER_NUMEL = 64_000_000
"""Most elements of one parameter."""

ADAM: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {},
    "adamw-foreach": {"foreach": True},
    "adamw-fused": {"fused": True},
}
"""Options of torch's AdamW by the name on the command line."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A model of parameters side by side, as a rank's buffers hold them.

    Parameters
    ----------
    weight
        bf16, flat.
    grad
        fp32, of the same length.
    """

    weight: torch.Tensor
    grad: torch.Tensor

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return self.weight.numel()

    def parameters(self) -> list[slice]:
        """The places of the parameters."""
        return [
            slice(start, min(start + PARAMETER_NUMEL, self.numel))
            for start in range(0, self.numel, PARAMETER_NUMEL)
        ]


def make_problem(numel: int, device: torch.device, seed: int) -> Problem:
    """Random normal weights and gradients: data that neither a drive nor a bus can compress.

    Parameters
    ----------
    numel
        Elements in all.
    device
        Where they are made, by the device's own generator.
    seed
        Equal seeds give equal problems on one kind of device.
    """
    generator = torch.Generator(device).manual_seed(seed)
    problem = Problem(
        weight=torch.empty(numel, dtype=torch.bfloat16, device=device),
        grad=torch.empty(numel, dtype=torch.float32, device=device),
    )
    for place in problem.parameters():
        problem.weight[place].normal_(0.0, 0.02, generator=generator)
        problem.grad[place].normal_(0.0, 1e-3, generator=generator)
    return problem


def make_optimizer(name: str, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """AdamW of torch in one of its implementations; see `OPTIMIZERS`."""
    return torch.optim.AdamW(params, **ADAM, **OPTIMIZERS[name])
