"""What a peer is, and which there are."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from benchmarks.problem import Problem

__all__ = ["PEERS", "Entry", "Outcome", "Peer", "Task", "opener"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one process measures.

    Parameters
    ----------
    numel, seed, device, optimizer
        The problem, where its tensors are, and a name of `benchmarks.problem.OPTIMIZERS` for peers
        that update on that device.
    directory
        An empty directory for this peer alone; whoever made it removes it.
    repeats, warmup
        Steps that count, and steps before them.
    """

    numel: int
    seed: int
    device: str
    optimizer: str
    directory: str
    repeats: int
    warmup: int


class Peer(Protocol):
    """An optimizer whose state is away from the device.

    Attributes
    ----------
    note
        What it keeps and where it updates, in a line.
    moved_nbytes
        Bytes that one step moves between where the state lives and where it is updated, or, for
        peers that update on the CPU, between CPU and device; both directions.
    """

    note: str
    moved_nbytes: int

    def prepare(self) -> None:
        """Make ready for a step; not timed."""

    def step(self) -> None:
        """One optimizer step with the gradients of the problem."""

    def findings(self) -> Mapping[str, Any]:
        """What else was seen, as JSON values."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a peer.

    Parameters
    ----------
    name
        Which.
    not_run
        Why there are no numbers; empty if there are.
    step_s
        Seconds of each step.
    device_nbytes, host_nbytes
        What peaks of device and host memory grew by from before the peer was set up.
    moved_nbytes, note, findings
        As `Peer` has them.
    """

    name: str
    not_run: str = ""
    step_s: tuple[float, ...] = ()
    device_nbytes: int = 0
    host_nbytes: int = 0
    moved_nbytes: int = 0
    note: str = ""
    findings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Open = Callable[[Problem, Task], contextlib.AbstractContextManager[Peer]]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """Where a peer is, and which of ours it stands beside.

    Parameters
    ----------
    module, function
        What opens it; imported in the peer's own process only.
    beside
        The tier of tierstore that keeps the state in the same place.
    """

    module: str
    function: str
    beside: str


PEERS: Mapping[str, Entry] = {
    "tierstore-nvme": Entry("ours", "nvme", "tierstore-nvme"),
    "serial-files-cold": Entry("serial_files", "cold", "tierstore-nvme"),
    "serial-files-warm": Entry("serial_files", "warm", "tierstore-nvme"),
    "deepspeed-nvme": Entry("deepspeed_nvme", "opened", "tierstore-nvme"),
    "tierstore-cpu": Entry("ours", "cpu", "tierstore-cpu"),
    "serial-memory": Entry("serial_memory", "opened", "tierstore-cpu"),
    "torchao": Entry("torchao_offload", "opened", "tierstore-cpu"),
    "megatron-hybrid": Entry("megatron_hybrid", "opened", "tierstore-cpu"),
}
"""By name, in the order in which they run: who is compared runs one soon after the other."""


def opener(name: str) -> Open:
    """What opens a peer.

    Raises
    ------
    ImportError
        The peer's package is not installed.
    """
    entry = PEERS[name]
    module = importlib.import_module(f"benchmarks.peers.{entry.module}")
    found: Open = getattr(module, entry.function)
    return found
