"""What is trained and compared: the dimensions of a case, and the choice of cases."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from megatron_pairwise import Row, pairwise

STEPS = 10
OVERFLOWS = (3, 6)  # the steps of an fp16 run whose gradients are made infinite

WORLD_SIZES = {"dp1": 1, "dp2": 2, "tp2": 2, "ep2": 2}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run; two runs of one recipe are equal to the bit."""

    parallel: str = "dp1"  # dp1 | dp2 | tp2 | ep2
    model: str = "plain"  # plain | gpt | moe
    params: str = "uniform"  # uniform | fp32 (some stay in fp32) | unused (some get no gradient)
    dtype: str = "bf16"  # bf16 | fp32 | fp16 (with a dynamic loss scale and two overflows)
    grads: str = "fp32"  # fp32 | native (as the parameters)
    overlap: bool = False  # of gradient reduction and parameter gather, in several buckets
    clip: bool = True
    decay: str = "groups"  # groups (none for biases) | one (for all) | l2 (Adam, not AdamW)
    schedule: str = "cosine"  # cosine (with warm-up) | constant | betas (new ones every step)
    micro_batches: int = 1
    interlude: str = "none"  # what happens half-way: none | reload (of weights) | load (of states)

    @property
    def world_size(self) -> int:
        """Processes that the recipe needs."""
        return WORLD_SIZES[self.parallel]


@dataclass(frozen=True, kw_only=True)
class Tier:
    """How the state is held in the second run."""

    tier: str = "nvme"  # nvme | cpu
    chunk_numel: int = 200_000_000
    tile_numel: int = 4096
    slots: int = 4
    recovery: str = "step"


@dataclass(frozen=True, kw_only=True)
class Build:
    """Which Megatron runs the case, with which optimizer, and where."""

    path: str  # first on PYTHONPATH; empty for the installed megatron-core
    version: str
    flavour: str  # torch (step in the state) | fused (step in the group) | installed (on a GPU)
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison of an untouched run with a second one."""

    build: Build
    recipe: Recipe = field(default_factory=Recipe)
    tier: Tier | None = field(default_factory=Tier)  # None: the second run is untouched as well
    sabotage: str | None = None  # what is broken on purpose in the second run
    fault: str | None = None  # what fails once on the last rank: write | commit, and is rolled
    # back; or restart: a commit, after which all ranks start again and resume
    # save: the first half of the run, into the directory; load: that, as it is; continue: that, and
    # train the second half.
    checkpoint: str | None = None
    delays: bool = False  # whether transfers start and end late, by random times
    timeout_s: float = 180.0

    @property
    def name(self) -> str:
        """A readable id, equal for equal cases."""
        recipe = self.recipe
        words = [self.build.version, self.build.flavour, recipe.parallel, recipe.model]
        words += [recipe.params] * (recipe.params != "uniform")
        words += [recipe.dtype, f"{recipe.grads}grads"]
        words += ["overlap"] * recipe.overlap + ["clip" if recipe.clip else "noclip"]
        words += [f"wd_{recipe.decay}", recipe.schedule, f"mb{recipe.micro_batches}"]
        words += [recipe.interlude] * (recipe.interlude != "none")
        if self.tier is not None:
            tier = self.tier
            words += [tier.tier, f"chunk{tier.chunk_numel}", f"tile{tier.tile_numel}"]
            words += [f"slots{tier.slots}", f"recovery_{tier.recovery}"]
        words += ["delays"] * self.delays
        words += [self.checkpoint] if self.checkpoint else []
        words += [f"failed_{self.fault}"] if self.fault else []
        words += [self.sabotage] if self.sabotage else []
        return "-".join(words)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Case:
        """Undo what ``dataclasses.asdict`` and JSON did to a case."""
        values = dict(values)
        values["build"] = Build(**values["build"])
        values["recipe"] = Recipe(**values["recipe"])
        values["tier"] = values["tier"] and Tier(**values["tier"])
        return cls(**values)

    @property
    def group(self) -> tuple[Build, int]:
        """Cases of one group can run in the same processes."""
        return self.build, self.recipe.world_size


DIMENSIONS: dict[str, list[Any]] = {
    "parallel": ["dp2", "dp1", "ep2", "tp2"],
    "model": ["plain", "gpt", "moe"],
    "params": ["uniform", "fp32", "unused"],
    "dtype": ["bf16", "fp16", "fp32"],
    "grads": ["fp32", "native"],
    "overlap": [False, True],
    "clip": [True, False],
    "decay": ["groups", "one", "l2"],
    "schedule": ["cosine", "betas", "constant"],
    "micro_batches": [1, 4],
    "interlude": ["none", "reload", "load"],
    "chunk_numel": [1024, 6144, 200_000_000],
    "tile_numel": [1024, 4096, 4 * 2**20],
    "slots": [2, 3, 5],
    "recovery": ["step", "none"],
}


def allowed(row: Row) -> bool:
    """Say whether Megatron can train this (perhaps partial) combination at all."""
    # Experts with tensor parallelism need sequence parallelism, which needs another layer norm.
    models = {"tp2": ("gpt",), "ep2": ("moe",)}.get(row.get("parallel", ""))
    if models is not None and row.get("model", models[0]) not in models:
        return False
    if row.get("params", "uniform") != "uniform" and row.get("model", "plain") != "plain":
        return False
    # Megatron refuses to overlap the reduction of a gradient that never comes.
    if row.get("params") == "unused" and row.get("overlap"):
        return False
    if row.get("params") == "fp32":
        # Megatron confuses the parameters of a group of two types when it loads their states.
        return row.get("dtype", "bf16") != "fp32" and row.get("interlude", "none") != "load"
    return True


def megatron_builds() -> list[Build]:
    """Return the builds of Megatron on the CPU: the installed one, or those that are listed.

    ``TIERSTORE_MEGATRON_PATHS`` lists directories to put first on the path, one version in each;
    an empty entry is the installed megatron-core.
    """
    builds = []
    for path in os.environ.get("TIERSTORE_MEGATRON_PATHS", "").split(os.pathsep):
        version = _megatron_version(path)
        if version is not None:
            builds += [
                Build(path=path, version=version, flavour=flavour) for flavour in ("torch", "fused")
            ]
    return builds


def cuda_builds() -> list[Build]:
    """Return the builds for a machine with a GPU: the installed megatron-core."""
    version = _megatron_version("")
    if version is None:
        return []
    fused = any(importlib.util.find_spec(name) for name in ("transformer_engine", "apex"))
    flavours = ["installed"] if fused else ["torch", "fused"]
    return [Build(path="", version=version, flavour=name, device="cuda") for name in flavours]


def tiers_of(builds: list[Build]) -> list[str]:
    """Return the tiers that can run with these builds."""
    if not builds:
        return []
    gds = builds[0].device == "cuda" and importlib.util.find_spec("kvikio") is not None
    return ["nvme", "cpu", *(["gds"] if gds else [])]


def bit_equal_cases(builds: list[Build], *, single_rank: bool = False) -> list[Case]:
    """Choose cases so that every value of every dimension meets every value of all others.

    Each build with each tier is one value of a dimension of its own.
    """
    targets = [(build, tier) for build in builds for tier in tiers_of(builds)]
    dimensions: dict[str, list[Any]] = {"target": targets} | DIMENSIONS
    if single_rank:
        dimensions["parallel"] = ["dp1"]
    return [_case(row) for row in pairwise(dimensions, allowed)] if targets else []


def _case(row: Row) -> Case:
    build, tier = row["target"]
    recipe = {name: row[name] for name in Recipe.__dataclass_fields__}
    knobs = {name: row[name] for name in Tier.__dataclass_fields__ if name != "tier"}
    return Case(build=build, recipe=Recipe(**recipe), tier=Tier(tier=tier, **knobs))


def _megatron_version(path: str) -> str | None:
    where = [path] if path else sys.path
    found = importlib.metadata.distributions(name="megatron-core", path=where)
    return next((distribution.version for distribution in found), None)
