"""Which earlier run's state the ranks of a job take up: a run and a step that all of them hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.answers import Offer

__all__ = ["Choice", "choose", "describe"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A run and a step that every rank holds; or none, and why."""

    nonce: str = ""
    step: int = -1
    reasons: tuple[str, ...] = ()


def describe(offers: Sequence[Offer], layouts: Mapping[str, str]) -> list[dict[str, Any]]:
    """What one rank holds of earlier runs, as JSON values for the others.

    Parameters
    ----------
    offers
        Newest first.
    layouts
        What the rank needs: `OptimizerLayout.fingerprint` by optimizer.
    """
    other = "its layout is another one (other parameters, parallel sizes, tiles or chunks)"
    return [
        {
            "nonce": offer.nonce,
            "steps": list(offer.steps),
            "problem": offer.problem or ("" if dict(offer.layouts) == dict(layouts) else other),
        }
        for offer in offers
    ]


def choose(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> Choice:
    """The first run of rank 0's that every rank can take up, at the highest step that all hold.

    Every rank gets the same answer, since every rank sees what all have said.

    Parameters
    ----------
    by_rank
        What `describe` gave on each rank.
    """
    reasons: list[str] = []
    for offer in by_rank[0] if by_rank else ():
        nonce = offer["nonce"]
        found = [{said["nonce"]: said for said in offers}.get(nonce) for offers in by_rank]
        problem = next(
            (
                f"rank {rank}: {'holds nothing of it' if said is None else said['problem']}"
                for rank, said in enumerate(found)
                if said is None or said["problem"]
            ),
            "",
        )
        common = set.intersection(*(set(said["steps"]) for said in found if said is not None))
        if not problem and not common:
            steps = ", ".join(
                f"rank {rank} {said['steps']}" for rank, said in enumerate(found) if said
            )
            problem = f"no step that all ranks hold ({steps})"
        if not problem and max(common) == 0:
            problem = "no step was made in it"
        if not problem:
            return Choice(nonce, max(common), tuple(reasons))
        reasons.append(f"run {nonce}: {problem}")
    return Choice(reasons=tuple(reasons) or ("there is no earlier run of this role here",))
