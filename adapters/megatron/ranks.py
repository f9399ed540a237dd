"""The ranks of a Megatron job, by a process group of their own on the CPU."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tierstore.errors import PeerError
from tierstore.ranks import Agreement, Alone, Ranks

__all__ = ["GlooRanks", "all_ranks"]

_SLACK_S = 60.0


class GlooRanks:
    """All ranks, through gloo: small messages that need no device and wait for no stream.

    Parameters
    ----------
    timeout_s
        Seconds after which a transfer is an error: a rank that is at one answers that late.
    """

    def __init__(self, timeout_s: float) -> None:
        import torch

        self._group: Any = torch.distributed.new_group(
            backend="gloo", timeout=dt.timedelta(seconds=timeout_s + _SLACK_S)
        )

    def agree(self, step: int, *, failed: bool) -> Agreement:
        """See `Ranks`."""
        import torch

        said = torch.tensor([step, -step, 0 if failed else 1], dtype=torch.int64, device="cpu")
        with _named():
            torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=self._group)
        lowest, minus_highest, all_well = said.tolist()
        return Agreement(lowest, -minus_highest, failed=not all_well)

    def gather(self, value: Any) -> list[Any]:
        """See `Ranks`."""
        import torch

        found: list[Any] = [None] * torch.distributed.get_world_size()
        with _named():
            torch.distributed.all_gather_object(found, value, group=self._group)
        return found


def all_ranks(timeout_s: float) -> Ranks:
    """The ranks of this job; every rank calls it."""
    import torch

    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return GlooRanks(timeout_s)
    return Alone()


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # A killed peer is the launcher's business; that nobody waits for it is ours.
        raise PeerError(f"a rank of the job does not answer, or is gone: {error}") from error
