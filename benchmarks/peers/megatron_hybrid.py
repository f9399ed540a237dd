"""Megatron's ``HybridDeviceOptimizer`` with everything on the CPU (``offload_fraction=1.0``).

Set up as Megatron does it for ``--optimizer-cpu-offload``: fp32 main params and moments in host
memory, fused AdamW of torch on the CPU, one optimizer a parameter, copies on streams of their own.
fp32 gradients go out and the new main params come back, from memory that is not page-locked: 8
bytes a parameter. The bf16 weights on the device are the problem's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from benchmarks.peers.peer import Peer, Task
from benchmarks.problem import ADAM, Problem

__all__ = ["MegatronHybrid", "opened"]


class MegatronHybrid:
    """The optimizer and bf16 parameters that share the problem's memory."""

    note = "fp32 main and moments in host memory, bf16 weights, update on the CPU (fused AdamW)"

    def __init__(self, problem: Problem) -> None:
        if problem.weight.device.type != "cuda":
            raise RuntimeError("it needs CUDA: without it, it offloads nothing")
        params = [torch.nn.Parameter(problem.weight[place]) for place in problem.parameters()]
        for param, place in zip(params, problem.parameters(), strict=True):
            # Where Megatron hands over fp32 gradients of bf16 parameters.
            param.decoupled_grad = problem.grad[place]  # type: ignore[attr-defined]
        self._optimizer: Any = HybridDeviceOptimizer(
            [{"params": params}],
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
            overlap_cpu_optimizer_d2h_h2d=True,
            fused=True,
            **ADAM,
        )
        self.moved_nbytes = 8 * problem.numel

    def prepare(self) -> None:
        """See `Peer`."""

    def step(self) -> None:
        """See `Peer`."""
        self._optimizer.step()

    def findings(self) -> Mapping[str, Any]:
        """See `Peer`."""
        return {}


@contextlib.contextmanager
def opened(problem: Problem, task: Task) -> Iterator[Peer]:
    """The optimizer as a peer."""
    yield MegatronHybrid(problem)
