"""Runs a case: an untouched run, a second one, and the comparison of the two."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron_cases import STEPS, Case, Recipe, Tier
from megatron_checkpoints import run_half
from megatron_faults import Fault, until_it_fails
from megatron_layout import layout_problems
from megatron_sabotage import disturbed
from megatron_training import Trace, Trainer, copied, differences, differences_of

from tierstore.adapters.megatron import Handle, attach
from tierstore.config import TierConfig
from tierstore.errors import TierStoreError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """What a handle counts."""

    steps: int = 0
    sweeps: int = 0
    read_nbytes: int = 0
    written_nbytes: int = 0


# Untouched runs by recipe: many cases share one.
_untouched: dict[Recipe, Trace] = {}


def run(case: Case, device: torch.device, directory: Path) -> dict[str, Any]:
    """Run one case on this rank.

    Returns
    -------
    dict
        ``differences`` lists what is not equal, ``problems`` what else went wrong, ``error`` is
        the typed error that the second run ended with.
    """
    misbehave(case.sabotage)
    _set_up_parallel_groups(case.recipe)
    if case.recipe not in _untouched:
        _untouched[case.recipe] = _run_untouched(case.recipe, device, None)
    untouched = _untouched[case.recipe]
    if case.checkpoint is not None and case.tier is not None:
        return run_half(case, case.tier, device, directory, untouched)
    result: dict[str, Any] = {"differences": [], "problems": [], "error": None}
    try:
        if case.tier is None:
            second = _run_untouched(case.recipe, device, case.sabotage)
        else:
            second, result["problems"] = _run_on_tier(case, case.tier, device, directory)
    except TierStoreError as error:
        if case.sabotage is None:
            raise
        result["error"] = f"{type(error).__name__}: {error}"
    else:
        result["differences"] = differences(untouched, second)
    return result


def _run_untouched(recipe: Recipe, device: torch.device, sabotage: str | None) -> Trace:
    trainer = Trainer(recipe, device)

    def after_step(step: int) -> None:
        if sabotage == "perturb_moment" and step == STEPS // 2:
            _, optimizer, param = next(trainer.shards())
            moment = trainer.untouched_state(optimizer, param)["exp_avg"].view(-1)
            moment[0] += moment.abs().max() + 1e-6

    trace = trainer.train(after_step)
    trainer.finish()
    trace.weights = trainer.weights()
    trace.states = {
        name: copied(trainer.untouched_state(optimizer, param))
        for name, optimizer, param in trainer.shards()
    }
    return trace


def _run_on_tier(
    case: Case, tier: Tier, device: torch.device, directory: Path
) -> tuple[Trace, list[str]]:
    trainer = Trainer(case.recipe, device)
    config = TierConfig(directories=(directory,), timeout_s=60.0, **dataclasses.asdict(tier))
    before, done = Trace(), 0
    if case.fault == "restart":
        before = until_it_fails(trainer, config)
        done = len(before.steps)
        trainer = trainer.started_again()
        config = dataclasses.replace(config, resume="require")
    counters: list[Counters] = []
    with (
        disturbed(case.sabotage, delays=case.delays),
        attach(trainer.optimizer, config) as handle,
    ):
        fault = Fault(handle, case.fault if done == 0 else None)
        trace = trainer.train(
            lambda step: counters.append(_counters(handle)),
            fault.recover if case.fault else None,
            range(done, STEPS),
        )
        trainer.finish()
        trace.weights = trainer.weights()
        trace.states = {
            name: copied(optimizer._get_main_param_and_optimizer_states(param))
            for name, optimizer, param in trainer.shards()
        }
        problems = [*fault.problems, *_miscounts(case, trainer, handle, trace, counters)]
        problems += _misreadings(trainer, handle, trace, directory / "snapshot")
        problems += layout_problems(trainer.model, directory / "snapshot")
        if done and (handle.resumed_step, handle.job_state) != (done, {"iteration": done}):
            problems.append(f"went on from step {handle.resumed_step} with {handle.job_state}")
    trace.steps = before.steps + trace.steps
    return trace, problems


def _miscounts(
    case: Case, trainer: Trainer, handle: Handle, trace: Trace, counters: list[Counters]
) -> Iterator[str]:
    """Check that the state really went through the tier, in every step that changed weights."""
    per_update = len(trainer.distributed_optimizers())
    nbytes = _state_nbytes(handle)
    before = Counters(steps=handle.resumed_step or 0)
    for number, (step, after) in enumerate(zip(trace.steps, counters, strict=True)):
        grown = dataclasses.replace(before)
        if step["success"]:
            grown = Counters(
                steps=before.steps + 1,
                sweeps=before.sweeps + per_update,
                read_nbytes=before.read_nbytes + nbytes,
                written_nbytes=before.written_nbytes + nbytes,
            )
        if case.fault:
            # Ranks that were ahead have swept the failed step twice.
            grown = dataclasses.replace(after, steps=grown.steps)
        if after != grown:
            yield f"step {number}: the handle counts {after} and should count {grown}"
        before = after
    if case.delays != hasattr(handle._state.store, "_late"):
        yield f"delays are {case.delays} and the store is {type(handle._state.store)}"
    if handle.window_nbytes <= 0:
        yield f"window_nbytes is {handle.window_nbytes}"


def _misreadings(trainer: Trainer, handle: Handle, trace: Trace, snapshot: Path) -> Iterator[str]:
    """Check what the handle says and what plain zarr reads against Megatron's accessor."""
    for name, _, param in trainer.shards():
        said = differences_of(name, trace.states[name], copied(handle.state_of(param)))
        yield from (f"by state_of(): {difference}" for difference in said)
    handle.snapshot(snapshot)
    names: dict[torch.Tensor, str] = {param: name for name, _, param in trainer.shards()}
    rank = zarr.open_group(snapshot / f"rank-{torch.distributed.get_rank():05d}", mode="r")
    for tiered in handle._tiered:
        arrays = {
            key: torch.from_numpy(np.asarray(rank[f"gen-a/{tiered.name}/{key}"]))
            for key in ("main", "exp_avg", "exp_avg_sq")
        }
        arrays["param"] = arrays.pop("main")
        for owned in tiered._owned:
            name, start = names[owned.parameter], owned.shard.array_start
            read = {key: data[start : start + owned.shard.numel] for key, data in arrays.items()}
            state = {key: trace.states[name][key].flatten() for key in read}
            yield from (f"by zarr: {found}" for found in differences_of(name, state, read))


def _counters(handle: Handle) -> Counters:
    return Counters(**{name: getattr(handle, name) for name in Counters.__dataclass_fields__})


def _state_nbytes(handle: Handle) -> int:
    """Return what one step has to move each way: all arrays in whole tiles."""
    return sum(
        entry.layout.n_tiles * entry.formats[name].tile_nbytes
        for entry in handle._state.optimizers.values()
        for name in entry.arrays
    )


def misbehave(sabotage: str | None) -> None:
    """Let the last rank fail in one of the ways that the parent has to cope with."""
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        if sabotage == "raise":
            raise RuntimeError("this rank was told to fail")
        if sabotage == "die":
            os._exit(3)
        if sabotage == "hang":
            signal.alarm(60)  # the end, should the parent be gone
            signal.pause()


def _set_up_parallel_groups(recipe: Recipe) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2 if recipe.parallel == "tp2" else 1,
        expert_model_parallel_size=2 if recipe.parallel == "ep2" else 1,
    )
    cuda = torch.cuda.is_available()
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=not cuda, force_reset_rng=True)
