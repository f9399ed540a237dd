"""Saves the state half-way, and loads it in another run, perhaps on another topology."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron_cases import STEPS, Case, Tier
from megatron_layout import assembled, layout_problems
from megatron_training import Trace, Trainer, copied, differences

from tierstore.adapters.megatron import attach
from tierstore.config import TierConfig


def run_half(
    case: Case, tier: Tier, device: torch.device, directory: Path, untouched: Trace
) -> dict[str, Any]:
    """Run one half of a case, see `Case.checkpoint`; what is wrong is in the result."""
    config = TierConfig(
        directories=(directory / str(case.checkpoint),),
        timeout_s=60.0,
        **dataclasses.asdict(tier),
    )
    half, checkpoint = STEPS // 2, directory / "checkpoint"
    trainer = Trainer(case.recipe, device)
    result: dict[str, Any] = {"differences": [], "problems": [], "error": None}
    if case.checkpoint == "save":
        with attach(trainer.optimizer, config) as handle:
            handle.job_state = {"half": half}
            trace = trainer.train(steps=range(half))
            handle.snapshot(checkpoint)
        trainer.finish()
        schedule = trainer.schedule.state_dict()
        (directory / "schedule.json").write_text(json.dumps(schedule))
        if any(a != b for a, b in zip(trace.steps, untouched.steps, strict=False)):
            result["problems"].append("the first half is not that of the untouched run")
        torch.distributed.barrier()
        return result
    trainer = trainer.started_again()
    trainer.schedule.load_state_dict(json.loads((directory / "schedule.json").read_text()))
    with attach(trainer.optimizer, config) as handle:
        step = handle.load_from(checkpoint)
        if (step, handle.steps, handle.job_state) != (half, half, {"half": half}):
            result["problems"].append(f"step {step}, {handle.steps}, {handle.job_state}")
        handle.snapshot(directory / "again")
        result["problems"] += layout_problems(trainer.model, directory / "again")
        result["problems"] += _unequal(checkpoint, directory / "again")
        if case.checkpoint == "continue":
            trace = trainer.train(steps=range(half, STEPS))
            trainer.finish()
            trace.steps = untouched.steps[:half] + trace.steps
            trace.weights = trainer.weights()
            trace.states = {
                name: copied(optimizer._get_main_param_and_optimizer_states(param))
                for name, optimizer, param in trainer.shards()
            }
            result["differences"] = differences(untouched, trace)
    return result


def _unequal(one: Path, other: Path) -> list[str]:
    """Global tensors that are not the same, bit for bit, in two stores."""
    found = []
    for array in ("main", "exp_avg", "exp_avg_sq"):
        before, after = assembled(one, array), assembled(other, array)
        if before.keys() != after.keys():
            found.append(f"{array}: {sorted(before)} became {sorted(after)}")
            continue
        found += [
            f"{array} of {key} is another one"
            for key, values in before.items()
            if np.isnan(values).any() or values.tobytes() != after[key].tobytes()
        ]
    return found
