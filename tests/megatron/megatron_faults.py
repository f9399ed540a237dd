"""A drive that fails once on one rank, and a trainer that rolls back and makes the step again."""

from __future__ import annotations

from typing import Any

import torch
from megatron_cases import STEPS
from megatron_training import Trace, Trainer

from tierstore.adapters.megatron import Handle, attach
from tierstore.config import TierConfig
from tierstore.errors import PeerError, TransferError


class Fault:
    """Lets one call of the last rank's store fail in the middle of the run.

    Parameters
    ----------
    handle
        Of this rank's state.
    kind
        ``write``: a tile; ``commit``: when the other ranks have committed the step; or None.

    Attributes
    ----------
    problems
        What did not go as it must, for the report.
    """

    def __init__(self, handle: Handle, kind: str | None) -> None:
        self._handle = handle
        self._raised: list[type[Exception]] = []
        self._rank = torch.distributed.get_rank()
        self._last = torch.distributed.get_world_size() - 1
        self._kind = kind
        if kind is not None and self._rank == self._last:
            self._arm(f"_{kind}")

    def _arm(self, method: str) -> None:
        store = self._handle._state.store
        real = getattr(store, method)

        def failing(*arguments: Any) -> Any:
            if self._handle.steps == STEPS // 2 and not self._raised:
                setattr(store, method, real)
                raise TransferError(5, "this drive was told to fail")
            return real(*arguments)

        setattr(store, method, failing)

    def recover(self, error: Exception) -> None:
        """Go back with all ranks, and to the weights and step of before."""
        self._raised.append(type(error))
        self._handle.rollback()

    @property
    def problems(self) -> list[str]:
        """Whether exactly one step failed, with the right error on each rank."""
        if self._kind is None:
            return []
        wanted = [TransferError if self._rank == self._last else PeerError]
        return [] if self._raised == wanted else [f"rank {self._rank} raised {self._raised}"]


def until_it_fails(trainer: Trainer, config: TierConfig) -> Trace:
    """Train until the last rank can't commit a step that all others have; the steps before it."""
    trace = Trace()
    handle = attach(trainer.optimizer, config)
    fault = Fault(handle, "commit")
    try:
        for step in range(STEPS):
            handle.job_state = {"iteration": step + 1}
            trace.steps += trainer.train(steps=range(step, step + 1)).steps
    except (PeerError, TransferError) as error:
        fault._raised.append(type(error))
    if fault.problems:
        raise AssertionError(fault.problems)
    # As the end of the process does it: nothing is said to anybody.
    handle._state.close()
    return trace
