"""DeepSpeed's ZeRO-Infinity: stage 3, optimizer state on NVMe, pipelined reads and writes.

A real engine on one rank. bf16 weights; fp32 main params and moments in files, one sub-group for
each parameter; ``DeepSpeedCPUAdam`` updates on the CPU. Gradients go to files as well: backward
writes them (4 bytes a parameter), the step reads main, moments and gradients (16) and writes main
and moments (12). What is timed is backward and step, since backward is where gradients leave the
device; the model is a product with the ready gradient, in bf16, which takes the device no time
worth naming. Files are written in place, without checksums and without fsync.

Its extensions ``async_io`` and ``cpu_adam`` are compiled on first use: that needs g++, ninja, nvcc
beside a CUDA build of torch, and libaio with its header.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed  # type: ignore[import-not-found,unused-ignore]
import torch

from benchmarks.peers.peer import Peer, Task
from benchmarks.problem import ADAM, PARAMETER_NUMEL, Problem

__all__ = ["DeepspeedNvme", "opened"]


class _Product(torch.nn.Module):
    """A parameter whose gradient is known."""

    def __init__(self, weight: torch.Tensor, grad: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())
        self._grad = grad

    def forward(self) -> torch.Tensor:
        return (self.weight.float() * self._grad).sum()


class _Model(torch.nn.Module):
    """All parameters of a problem, each in a module of its own: the engine gathers by module."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(
            _Product(problem.weight[place], problem.grad[place]) for place in problem.parameters()
        )

    def forward(self) -> torch.Tensor:
        return torch.stack([part() for part in self.parts]).sum()


class DeepspeedNvme:
    """The engine and its model.

    Parameters
    ----------
    problem
        Weights and gradients; the engine has its own copy of the weights.
    directory
        Where it makes its files.
    """

    note = "fp32 main, moments and gradients in files, bf16 weights, update on the CPU, no fsync"

    def __init__(self, problem: Problem, directory: str) -> None:
        options = {**ADAM, "betas": list(ADAM["betas"])}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": options},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": PARAMETER_NUMEL,
                "stage3_param_persistence_threshold": 0,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": directory,
                    # Four for each sub-group: one is read, one updated, one written.
                    "buffer_count": 12,
                    "pipeline_read": True,
                    "pipeline_write": True,
                    "pin_memory": problem.weight.device.type == "cuda",
                },
            },
            "aio": {
                "block_size": 2**20,
                "queue_depth": 16,
                "intra_op_parallelism": 8,
                "single_submit": False,
                "overlap_events": True,
            },
        }
        self._engine: Any
        self._engine, *_ = deepspeed.initialize(model=_Model(problem), config=config)
        self._loss: torch.Tensor | None = None
        self.moved_nbytes = 32 * problem.numel

    def prepare(self) -> None:
        """See `Peer`: the forward pass, which is none of the optimizer's."""
        self._loss = self._engine()

    def step(self) -> None:
        """See `Peer`."""
        self._engine.backward(self._loss)
        self._engine.step()

    def findings(self) -> Mapping[str, Any]:
        """See `Peer`."""
        return {"version": deepspeed.__version__}


@contextlib.contextmanager
def opened(problem: Problem, task: Task) -> Iterator[Peer]:
    """The engine as a peer, in a process group of one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(one, MASTER_PORT=str(port))
    try:
        yield DeepspeedNvme(problem, task.directory)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
