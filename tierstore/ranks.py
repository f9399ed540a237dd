"""What the ranks of a job tell each other: did the step work everywhere, and which step is held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Agreement", "Alone", "Ranks"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks together have said.

    Parameters
    ----------
    lowest_step, highest_step
        Of the steps that they have committed.
    failed
        Whether any of them failed.
    """

    lowest_step: int
    highest_step: int
    failed: bool


class Ranks(Protocol):
    """All ranks of a job. Every rank makes the same calls in the same order."""

    def agree(self, step: int, *, failed: bool) -> Agreement:
        """Say which step this rank has committed and whether it failed; hear what all say.

        Raises
        ------
        PeerError
            A rank did not answer.
        """

    def gather(self, value: Any) -> list[Any]:
        """Give a JSON value; get those of all ranks, in the order of the ranks.

        Raises
        ------
        PeerError
            A rank did not answer.
        """


class Alone:
    """A job of one rank."""

    def agree(self, step: int, *, failed: bool) -> Agreement:
        """See `Ranks`."""
        return Agreement(step, step, failed)

    def gather(self, value: Any) -> list[Any]:
        """See `Ranks`."""
        return [value]
