"""A loop without overlap over page-locked memory: copy in, update, copy out, one after the other.

It keeps fp32 main params and both moments in page-locked host memory, moves 24 bytes a parameter,
and updates on the device in buckets of up to 200 M elements. It shows what overlap gains; it does
not check, snapshot or recover anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.peers.device_slot import ARRAYS, SLOT_NUMEL, DeviceSlot
from benchmarks.peers.peer import Peer, Task
from benchmarks.problem import Problem
from tierstore.backends._host_memory import HostSlab
from tierstore.device import open_device

__all__ = ["SerialMemory", "opened"]


class SerialMemory:
    """The loop and its memory.

    Parameters
    ----------
    problem, optimizer, slot_numel
        See `DeviceSlot`.
    """

    note = "fp32 main and moments page-locked, one slot, no overlap, update on the device"

    def __init__(self, problem: Problem, optimizer: str, slot_numel: int = SLOT_NUMEL) -> None:
        device = open_device(problem.weight.device)
        self._slot = DeviceSlot(problem, optimizer, slot_numel)
        self._slab = HostSlab(len(ARRAYS) * problem.numel * 4, device)
        whole = self._slab.tensor.view(torch.float32).split(problem.numel)
        self.arrays: dict[str, torch.Tensor] = dict(zip(ARRAYS, whole, strict=True))
        self.moved_nbytes = 2 * self._slab.nbytes
        self._steps = 0
        for bucket in self._slot.buckets():
            self._slot.initialise(bucket)
            self._copy_out(bucket)

    def prepare(self) -> None:
        """See `Peer`."""

    def step(self) -> None:
        """See `Peer`."""
        for bucket in self._slot.buckets():
            self._copy_in(bucket)
            self._slot.update(bucket, self._steps)
            self._copy_out(bucket)
        self._steps += 1

    def _copy_in(self, bucket: slice) -> None:
        # Copies that are not `non_blocking` return when they are done.
        for name, array in self._slot.arrays.items():
            array[: bucket.stop - bucket.start].copy_(self.arrays[name][bucket])

    def _copy_out(self, bucket: slice) -> None:
        for name, array in self._slot.arrays.items():
            self.arrays[name][bucket].copy_(array[: bucket.stop - bucket.start])

    def findings(self) -> Mapping[str, Any]:
        """See `Peer`."""
        return {}

    def close(self) -> None:
        """Undo the page lock."""
        self._slab.close()


@contextlib.contextmanager
def opened(problem: Problem, task: Task) -> Iterator[Peer]:
    """The loop as a peer."""
    with contextlib.closing(SerialMemory(problem, task.optimizer)) as peer:
        yield peer
