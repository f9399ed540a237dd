"""tierstore itself, on the nvme and the cpu tier, set up as `benchmarks.sweep` does it.

fp32 main params and both moments are on the tier, 24 bytes a parameter move in a step, and torch's
AdamW updates on the device. The nvme tier keeps two generations: a crash in mid-step loses nothing,
and every step ends with the data on the drive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import Peer, Task
from benchmarks.problem import Problem
from benchmarks.streamed import Streamed, streamed
from tierstore.config import TierConfig

__all__ = ["Ours", "cpu", "nvme"]


class Ours:
    """A store as a peer among others."""

    def __init__(self, subject: Streamed) -> None:
        self._subject = subject
        layout = subject.layout
        set_nbytes = sum(form.tile_nbytes for form in layout.formats.values())
        self.moved_nbytes = 2 * layout.layout.n_tiles * set_nbytes
        self.note = (
            f"fp32 main and moments on the tier ({subject.state.store.mode}), update on the device"
        )

    def prepare(self) -> None:
        """See `Peer`."""

    def step(self) -> None:
        """See `Peer`; with the tiles that are read ahead for the next step."""
        self._subject.step()
        self._subject.come_to_rest()

    def findings(self) -> Mapping[str, Any]:
        """See `Peer`."""
        return {"window_nbytes": self._subject.state.window.nbytes}


@contextlib.contextmanager
def nvme(problem: Problem, task: Task) -> Iterator[Peer]:
    """The state in files, with the default recovery."""
    config = TierConfig(tier="nvme", directories=(Path(task.directory),), role="benchmark")
    with streamed(problem, config, task.optimizer) as subject:
        yield Ours(subject)


@contextlib.contextmanager
def cpu(problem: Problem, task: Task) -> Iterator[Peer]:
    """The state in page-locked memory."""
    with streamed(problem, TierConfig(tier="cpu"), task.optimizer) as subject:
        yield Ours(subject)
