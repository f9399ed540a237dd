"""The tests' own tools: equal runs are equal, unequal ones are not, and failures are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_cases import DIMENSIONS, Case, Recipe, allowed, megatron_builds
from megatron_harness import GroupFailureError, GroupPool
from megatron_pairwise import feasible_pairs, pairwise

BUILDS = megatron_builds()
RECIPES = [
    Recipe(),
    Recipe(parallel="dp2", params="fp32", dtype="fp16", overlap=True, schedule="betas"),
    Recipe(parallel="tp2", model="gpt", overlap=True),
    Recipe(parallel="ep2", model="moe", overlap=True, micro_batches=4),
]


CASES = [
    Case(build=build, recipe=recipe, tier=None, sabotage=sabotage)
    for build in BUILDS
    for recipe in RECIPES
    for sabotage in (None, "perturb_moment")
]


@pytest.mark.megatron
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_untouched_runs_differ_only_when_disturbed(
    case: Case, megatron_groups: GroupPool, tmp_path: Path
) -> None:
    for result in megatron_groups.run(case, tmp_path):
        assert bool(result["differences"]) == (case.sabotage is not None), result["differences"]


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("sabotage", "timeout_s", "report"),
    [
        ("raise", 60.0, "rank 1 failed"),
        ("die", 60.0, "rank 1 gone"),
        ("hang", 3.0, "no answer within 3 s"),
    ],
)
def test_a_failing_case_is_reported_and_the_next_one_runs(
    sabotage: str, timeout_s: float, report: str, megatron_groups: GroupPool, tmp_path: Path
) -> None:
    if not BUILDS:
        pytest.skip("no megatron-core is installed")
    recipe = Recipe(parallel="dp2")
    failing = Case(
        build=BUILDS[0], recipe=recipe, tier=None, sabotage=sabotage, timeout_s=timeout_s
    )
    with pytest.raises(GroupFailureError, match=report) as failure:
        megatron_groups.run(failing, tmp_path)
    # The stacks of both ranks: of the one that misbehaved and of the one that waited for it.
    assert "===== rank 0" in str(failure.value)
    assert "in misbehave" in str(failure.value) or sabotage == "die"
    working = Case(build=BUILDS[0], recipe=recipe, tier=None)
    assert [result["differences"] for result in megatron_groups.run(working, tmp_path)] == [[], []]


def test_every_possible_pair_of_values_is_chosen() -> None:
    rows = pairwise(DIMENSIONS, allowed)
    assert all(allowed(row) and list(row) for row in rows)
    missing = [
        pair
        for pair in feasible_pairs(DIMENSIONS, allowed)
        if not any(all(row[name] == value for name, value in pair) for row in rows)
    ]
    assert missing == []
    for name, values in DIMENSIONS.items():
        assert {row[name] for row in rows} == set(values)
