"""One slot of device memory for each array, and torch's AdamW on what is in it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.problem import OPTIMIZERS, Problem, make_optimizer

__all__ = ["ARRAYS", "SLOT_NUMEL", "DeviceSlot"]

ARRAYS = ("main", "exp_avg", "exp_avg_sq")
SLOT_NUMEL = 200_000_000


class DeviceSlot:
    """Where loops without overlap update one bucket of parameters after the other.

    Parameters
    ----------
    problem
        Weights and gradients.
    optimizer
        A name of `OPTIMIZERS`.
    slot_numel
        Most elements of a bucket.

    Attributes
    ----------
    arrays
        fp32 memory of a bucket, by array.
    """

    def __init__(self, problem: Problem, optimizer: str, slot_numel: int = SLOT_NUMEL) -> None:
        self._problem, self._optimizer = problem, optimizer
        self._slot_numel = min(slot_numel, problem.numel)
        device = problem.weight.device
        self.arrays = {name: torch.zeros(self._slot_numel, device=device) for name in ARRAYS}
        self._counter_device = device if OPTIMIZERS[optimizer].get("fused") else None

    def buckets(self) -> Iterator[slice]:
        """The buckets of the problem, in order."""
        for start in range(0, self._problem.numel, self._slot_numel):
            yield slice(start, min(start + self._slot_numel, self._problem.numel))

    def initialise(self, bucket: slice) -> None:
        """Put a bucket's state before the first step into the slot."""
        self.arrays["main"][: bucket.stop - bucket.start].copy_(self._problem.weight[bucket])
        for name in ARRAYS[1:]:
            self.arrays[name].zero_()

    def update(self, bucket: slice, steps_done: int) -> None:
        """Step the bucket that is in the slot, and copy the result into the weights."""
        views = {name: self.arrays[name][: bucket.stop - bucket.start] for name in ARRAYS}
        main = views.pop("main")
        main.grad = self._problem.grad[bucket]
        optimizer = make_optimizer(self._optimizer, [main])
        counter = torch.tensor(float(steps_done), device=self._counter_device)
        optimizer.state[main] = {"step": counter, **views}
        optimizer.step()
        self._problem.weight[bucket].copy_(main)
