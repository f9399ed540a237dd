"""State that one topology has saved is loaded, to the bit, on another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from megatron_cases import Build, Case, Recipe, Tier, megatron_builds
from megatron_harness import GroupPool

BUILDS = megatron_builds()
GPT, MOE = Recipe(model="gpt"), Recipe(model="moe")

MOVES = [
    (replace(recipe, parallel=source), replace(recipe, parallel=target))
    for recipe, moves in (
        (GPT, [(a, b) for a in ("dp1", "dp2", "tp2") for b in ("dp1", "dp2", "tp2")]),
        (MOE, [("dp2", "ep2"), ("ep2", "dp2"), ("ep2", "dp1"), ("dp1", "ep2"), ("ep2", "ep2")]),
        (Recipe(params="fp32"), [("dp1", "dp2"), ("dp2", "dp1")]),
    )
    for source, target in moves
]


def name_of(move: tuple[Recipe, Recipe]) -> str:
    source, target = move
    return f"{source.model}-{source.params}-{source.parallel}-to-{target.parallel}"


@pytest.mark.megatron
@pytest.mark.parametrize("move", MOVES, ids=name_of)
def test_state_moves_to_another_topology(
    move: tuple[Recipe, Recipe], megatron_groups: GroupPool, tmp_path: Path
) -> None:
    if not BUILDS:
        pytest.skip("there is no megatron-core")
    source, target = move
    build: Build = BUILDS[MOVES.index(move) % len(BUILDS)]
    first, second = Tier(tile_numel=1024, chunk_numel=6144), Tier(tier="cpu", tile_numel=4096)
    if MOVES.index(move) % 2:
        first, second = second, replace(first, slots=2)
    cases = [
        Case(build=build, recipe=source, tier=first, checkpoint="save"),
        Case(
            build=build,
            recipe=target,
            tier=second,
            # With other reductions the numbers that follow are others.
            checkpoint="continue" if source == target else "load",
        ),
    ]
    for case in cases:
        for rank, result in enumerate(megatron_groups.run(case, tmp_path)):
            assert not result["differences"], (rank, result["differences"][:20])
            assert not result["problems"], (rank, result["problems"][:20])
