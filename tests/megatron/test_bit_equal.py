"""Training with the state on a tier is, bit for bit, training with untouched Megatron-core."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron_cases import (
    Build,
    Case,
    Recipe,
    Tier,
    bit_equal_cases,
    cuda_builds,
    megatron_builds,
    tiers_of,
)
from megatron_harness import GroupPool
from megatron_sabotage import KINDS


def late(builds: list[Build]) -> list[Case]:
    """Build cases in which transfers are late, with few and with many slots for many tiles."""
    knobs = [(tier, slots) for slots in (2, 3, 5) for tier in tiers_of(builds)]
    recipe = Recipe(params="fp32", interlude="reload")
    return [
        Case(
            build=builds[number % len(builds)],
            recipe=recipe,
            tier=Tier(tier=tier, tile_numel=1024, chunk_numel=4096, slots=slots),
            delays=True,
        )
        for number, (tier, slots) in enumerate(knobs)
    ]


def sabotaged(builds: list[Build]) -> list[Case]:
    """Build cases of every way to break the stream, on every tier, with the builds in turn."""
    ways = [(kind, tier) for kind in KINDS for tier in tiers_of(builds)]
    return [
        Case(
            build=builds[number % len(builds)],
            recipe=Recipe(clip=False, schedule="constant"),
            tier=Tier(tier=tier, tile_numel=1024, slots=3),
            sabotage=kind,
        )
        for number, (kind, tier) in enumerate(ways)
    ]


def failing(builds: list[Build]) -> list[Case]:
    """Build cases in which a step fails on one rank, and all ranks go back and make it again."""
    ways = [
        ("write", Recipe(parallel="dp2", model="gpt")),
        ("commit", Recipe(parallel="dp2", overlap=True)),
        ("write", Recipe(parallel="tp2", model="gpt", schedule="betas")),
        ("commit", Recipe(parallel="ep2", model="moe", micro_batches=4)),
        ("restart", Recipe(parallel="tp2", model="gpt")),
        ("restart", Recipe(parallel="dp2", overlap=True)),
        ("restart", Recipe(parallel="ep2", model="moe", schedule="constant")),
        ("restart", Recipe(params="fp32")),
        ("write", Recipe(params="fp32", clip=False)),
        ("commit", Recipe(decay="l2", grads="native")),
    ]
    return [
        Case(
            build=builds[number % len(builds)],
            recipe=recipe,
            tier=Tier(tile_numel=1024, slots=2),
            fault=fault,
        )
        for number, (fault, recipe) in enumerate(ways if builds else [])
    ]


CASES = failing(megatron_builds()) + bit_equal_cases(megatron_builds()) + late(megatron_builds())
CUDA_CASES = bit_equal_cases(cuda_builds(), single_rank=True) + late(cuda_builds())


def run(case: Case, groups: GroupPool, directory: Path) -> None:
    for rank, result in enumerate(groups.run(case, directory)):
        for what in ("differences", "problems"):
            if found := result[what]:
                pytest.fail(f"rank {rank}, {len(found)} {what}:\n" + "\n".join(found[:20]))


def run_sabotaged(case: Case, groups: GroupPool, directory: Path) -> None:
    for result in groups.run(case, directory):
        assert result["differences"] or result["error"]


@pytest.mark.megatron
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_is_bit_equal(case: Case, megatron_groups: GroupPool, tmp_path: Path) -> None:
    run(case, megatron_groups, tmp_path)


@pytest.mark.megatron
@pytest.mark.parametrize("case", sabotaged(megatron_builds()), ids=lambda case: case.name)
def test_a_broken_stream_is_seen(case: Case, megatron_groups: GroupPool, tmp_path: Path) -> None:
    run_sabotaged(case, megatron_groups, tmp_path)


@pytest.mark.cuda
@pytest.mark.megatron
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("case", CUDA_CASES, ids=lambda case: case.name)
def test_training_on_cuda_is_bit_equal(
    case: Case, megatron_groups: GroupPool, tmp_path: Path
) -> None:
    run(case, megatron_groups, tmp_path)


@pytest.mark.cuda
@pytest.mark.megatron
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("case", sabotaged(cuda_builds()), ids=lambda case: case.name)
def test_a_broken_stream_on_cuda_is_seen(
    case: Case, megatron_groups: GroupPool, tmp_path: Path
) -> None:
    run_sabotaged(case, megatron_groups, tmp_path)
