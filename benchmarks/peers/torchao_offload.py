"""torchao's ``CPUOffloadOptimizer``: gradients go to the host, the update runs there.

Its state has the type of its parameters, and there is no main param beside a bf16 weight. So that
the state is fp32 as everybody's, the parameters here are fp32: fp32 weights stay on the device, 4
bytes a parameter more than a bf16 model needs. fp32 gradients go out and fp32 weights come back, 8
bytes a parameter; torch's fused AdamW runs on the CPU, one parameter after the other. Copies of
gradients start in backward, as its hooks have it: the timed step calls backward with the ready
gradient. Page-locked memory of weights and gradients comes from torch, in powers of two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found,unused-ignore]

from benchmarks.peers.peer import Peer, Task
from benchmarks.problem import ADAM, Problem

__all__ = ["TorchaoOffload", "opened"]


class TorchaoOffload:
    """The optimizer and its fp32 parameters."""

    note = "fp32 weights on the device and no bf16 ones, update on the CPU (fused AdamW)"

    def __init__(self, problem: Problem) -> None:
        self._grads = [problem.grad[place] for place in problem.parameters()]
        self._params = [
            problem.weight[place].float().requires_grad_() for place in problem.parameters()
        ]
        self._optimizer: Any = CPUOffloadOptimizer(self._params, torch.optim.AdamW, **ADAM)
        self.moved_nbytes = 8 * problem.numel

    def prepare(self) -> None:
        """See `Peer`."""
        self._optimizer.zero_grad()

    def step(self) -> None:
        """See `Peer`."""
        for param, grad in zip(self._params, self._grads, strict=True):
            param.backward(grad)
        self._optimizer.step()

    def findings(self) -> Mapping[str, Any]:
        """See `Peer`."""
        return {}


@contextlib.contextmanager
def opened(problem: Problem, task: Task) -> Iterator[Peer]:
    """The optimizer as a peer."""
    yield TorchaoOffload(problem)
