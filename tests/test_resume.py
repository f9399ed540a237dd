"""The choice of a run and a step that all ranks hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from tierstore.adapters.megatron.resume import choose, describe
from tierstore.answers import Offer


def said(nonce: str, *steps: int, problem: str = "") -> dict[str, Any]:
    return {"nonce": nonce, "steps": list(steps), "problem": problem}


def test_the_highest_step_that_all_hold_is_chosen() -> None:
    choice = choose([[said("a", 7, 6)], [said("a", 6, 5)], [said("a", 7, 6)]])
    assert (choice.nonce, choice.step) == ("a", 6)


def test_the_newest_run_that_all_hold_is_chosen() -> None:
    choice = choose([[said("new", 1), said("old", 9)], [said("old", 9), said("new", 1)]])
    assert (choice.nonce, choice.step) == ("new", 1)


def test_a_run_that_a_rank_lacks_is_passed_over_and_said() -> None:
    choice = choose([[said("new", 1), said("old", 9)], [said("old", 9)]])
    assert (choice.nonce, choice.step) == ("old", 9)
    assert choice.reasons == ("run new: rank 1: holds nothing of it",)


def test_a_run_that_made_no_step_is_passed_over() -> None:
    choice = choose([[said("new", 0), said("old", 9, 8)], [said("new", 0), said("old", 8, 7)]])
    assert (choice.nonce, choice.step) == ("old", 8)
    assert choice.reasons == ("run new: no step was made in it",)


def test_no_common_step_is_said_with_the_steps() -> None:
    choice = choose([[said("a", 7, 6)], [said("a", 5, 4)]])
    assert choice.step == -1
    assert choice.reasons == ("run a: no step that all ranks hold (rank 0 [7, 6], rank 1 [5, 4])",)


def test_a_problem_of_one_rank_is_said() -> None:
    choice = choose([[said("a", 7)], [said("a", 7, problem="in use by another process")]])
    assert choice.reasons == ("run a: rank 1: in use by another process",)


def test_nothing_there_is_said() -> None:
    assert choose([[], []]).reasons == ("there is no earlier run of this role here",)
    assert choose([]).step == -1


def test_another_layout_is_a_problem() -> None:
    offer = Offer(path=Path("x"), nonce="a", steps=(3,), layouts={"opt-0": "one"})
    (same,) = describe([offer], {"opt-0": "one"})
    (other,) = describe([offer], {"opt-0": "one", "opt-1": "two"})
    assert (same["problem"], same["steps"]) == ("", [3])
    assert "another one" in other["problem"]
    (broken,) = describe([Offer(path=Path("x"), nonce="a", problem="damaged")], {})
    assert broken["problem"] == "damaged"


OFFERS = st.lists(
    st.builds(
        said,
        st.sampled_from("abc"),
        st.integers(0, 4),
        st.integers(0, 4),
        problem=st.sampled_from(["", "", "", "in use"]),
    ),
    max_size=3,
    unique_by=lambda offer: offer["nonce"],
)


@given(st.lists(OFFERS, min_size=1, max_size=4))
def test_what_is_chosen_can_be_taken_up_by_every_rank(by_rank: list[list[dict[str, Any]]]) -> None:
    choice = choose(by_rank)
    if choice.step < 0:
        assert choice.reasons
        for nonce in "abc":
            fits = [
                set(offer["steps"])
                for offers in by_rank
                for offer in offers
                if offer["nonce"] == nonce and not offer["problem"]
            ]
            if len(fits) == len(by_rank):
                assert set.intersection(*fits) <= {0}
        return
    for offers in by_rank:
        (mine,) = (offer for offer in offers if offer["nonce"] == choice.nonce)
        assert choice.step in mine["steps"]
        assert not mine["problem"]
