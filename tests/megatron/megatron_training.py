"""Trains a recipe with the real Megatron-core and records everything that has to be equal."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron_cases import OVERFLOWS, STEPS, Recipe
from megatron_models import DTYPES, build_model, loss_of

States = dict[str, dict[str, torch.Tensor]]


@dataclass
class Trace:
    """What one run did. Tensors are copies on the CPU."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    states: States = field(default_factory=dict)

    @property
    def updates(self) -> int:
        """Steps that changed the weights."""
        return sum(step["success"] for step in self.steps)


class Trainer:
    """A model, its Megatron optimizer and its schedule.

    Parameters
    ----------
    recipe
        What to train.
    device
        Where to train it.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe = recipe
        module = build_model(recipe).to(device)
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=recipe.grads == "fp32",
            overlap_grad_reduce=recipe.overlap,
            overlap_param_gather=recipe.overlap,
            bucket_size=4000 if recipe.overlap else None,
        )
        self.model = DistributedDataParallel(module.config, ddp_config, module)
        config = OptimizerConfig(
            optimizer="adam",
            lr=2e-2,
            min_lr=1e-3,
            weight_decay=0.1,
            decoupled_weight_decay=recipe.decay != "l2",
            bf16=recipe.dtype == "bf16",
            fp16=recipe.dtype == "fp16",
            params_dtype=DTYPES[recipe.dtype],
            use_distributed_optimizer=True,
            overlap_param_gather=recipe.overlap,
            clip_grad=0.05 if recipe.clip else 0.0,
            log_num_zeros_in_grad=True,
            initial_loss_scale=2.0**10,
            loss_scale_window=2,
            hysteresis=1,
        )
        overrides = {} if recipe.decay == "one" else get_standard_config_overrides(config)
        self.optimizer: Any = get_megatron_optimizer(config, [self.model], overrides)
        module.config.grad_scale_func = self.optimizer.scale_loss
        constant = recipe.schedule == "constant"
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=config.lr if constant else 0.0,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=0 if constant else 3,
            lr_decay_steps=STEPS,
            lr_decay_style="constant" if constant else "cosine",
            start_wd=0.1,
            end_wd=0.1 if constant else 0.2,
            wd_incr_steps=STEPS,
            wd_incr_style="constant" if constant else "cosine",
        )

    def train(
        self,
        after_step: Callable[[int], None] | None = None,
        recover: Callable[[Exception], None] | None = None,
        steps: range = range(STEPS),
    ) -> Trace:
        """Run steps and return the trace of the steps, without weights and states.

        Parameters
        ----------
        after_step
            Called with the number of each step that has been made.
        recover
            Called with what a step has raised; the step is then made again.
        steps
            Which of all.
        """
        trace = Trace()
        for step in steps:
            if step == STEPS // 2:
                self._interlude()
            try:
                trace.steps.append(self._step(step))
            except Exception as error:
                if recover is None:
                    raise
                recover(error)
                trace.steps.append(self._step(step))
            if after_step is not None:
                after_step(step)
        return trace

    def started_again(self) -> Trainer:
        """Return what a new process would make: other weights, and the schedule of a checkpoint."""
        again = Trainer(self.recipe, next(self.model.parameters()).device)
        with torch.no_grad():
            for param in again.model.parameters():
                param.mul_(0.5)
        again.optimizer.reload_model_params()
        again.schedule.load_state_dict(self.schedule.state_dict())
        return again

    def finish(self) -> None:
        """Wait for gathers that overlap with a next forward pass that will not come."""
        if self.recipe.overlap:
            self.model.start_param_sync(force_sync=True)

    def distributed_optimizers(self) -> list[Any]:
        """Return the ``DistributedOptimizer`` objects of the chain."""
        chain = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [optimizer for optimizer in chain if not optimizer.is_stub_optimizer]

    def shards(self) -> Iterator[tuple[str, Any, torch.nn.Parameter]]:
        """Yield name, optimizer and model parameter of what this rank holds a shard of."""
        names = {param: name for name, param in self.model.named_parameters()}
        for optimizer in self.distributed_optimizers():
            for param in optimizer.model_param_group_index_map:
                yield names[param], optimizer, param

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights."""
        return copied(dict(self.model.named_parameters()))

    def untouched_state(self, optimizer: Any, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return main param and optimizer state of a parameter, read where Megatron keeps them.

        Not read through Megatron's own accessor: that one mixes parameters up in a group that
        holds fp32 parameters next to others.
        """
        main = _main_param(optimizer, param)
        return {"param": main, **optimizer.optimizer.state[main]}

    @torch.no_grad()
    def _interlude(self) -> None:
        """Change weights or states from outside, in the ways that Megatron has for it."""
        if self.recipe.interlude == "reload":
            self.finish()
            for param in self.model.parameters():
                param.mul_(0.75)
            self.optimizer.reload_model_params()
        elif self.recipe.interlude == "load":
            for _, optimizer, param in self.shards():
                states = optimizer._get_main_param_and_optimizer_states(param)
                changed = {key: value * 0.75 for key, value in states.items() if key != "step"}
                optimizer._set_main_param_and_optimizer_states(param, states | changed)

    def _step(self, step: int) -> dict[str, Any]:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = []
        for micro_batch in range(self.recipe.micro_batches):
            last = micro_batch == self.recipe.micro_batches - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = loss_of(self.model, self.recipe, step, micro_batch)
                losses.append(_bits(loss))
                if self.recipe.dtype == "fp16" and step in OVERFLOWS:
                    loss = loss * float("inf")
                self.optimizer.scale_loss(loss / self.recipe.micro_batches).backward()
        finalize_model_grads([self.model])
        success, grad_norm, zeros = self.optimizer.step()
        self.schedule.step(increment=1)
        if self.recipe.schedule == "betas":
            for group in self.optimizer.param_groups:
                group["betas"] = (0.9 - 0.02 * step, 0.99 - 0.03 * step)
        return {
            "losses": losses,
            "success": bool(success),
            "grad_norm": None if grad_norm is None else _bits(grad_norm),
            "zeros": None if zeros is None else _bits(zeros),
            "loss_scale": _bits(self.optimizer.get_loss_scale()),
            "groups": [_hyperparameters(group) for group in self.optimizer.param_groups],
        }


def differences(first: Trace, second: Trace) -> list[str]:
    """Compare two runs bit for bit and describe what differs, the earliest first."""
    found = []
    for step, (a, b) in enumerate(zip(first.steps, second.steps, strict=True)):
        found += [f"step {step}: {k}: {a[k]} became {b.get(k)}" for k in a if a[k] != b.get(k)]
    found += differences_of("weight", first.weights, second.weights)
    if first.states.keys() != second.states.keys():
        found.append(f"shards: {sorted(first.states)} became {sorted(second.states)}")
    for name in first.states.keys() & second.states.keys():
        found += differences_of(name, first.states[name], second.states[name])
    return found


def differences_of(
    where: str, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> list[str]:
    if first.keys() != second.keys():
        return [f"{where}: keys {sorted(first)} became {sorted(second)}"]
    found = []
    for key, a in first.items():
        b = second[key]
        if a.shape != b.shape or a.dtype != b.dtype:
            kinds = f"{a.dtype} {tuple(a.shape)} became {b.dtype} {tuple(b.shape)}"
            found.append(f"{where} {key}: {kinds}")
            continue
        unequal = (a.reshape(-1, 1).view(torch.uint8) != b.reshape(-1, 1).view(torch.uint8)).any(1)
        where_unequal = unequal.nonzero().flatten()
        if len(where_unequal):
            at = int(where_unequal[0])
            found.append(
                f"{where} {key}: {len(where_unequal)} of {a.numel()} elements differ, the first at "
                f"{at}: {a.flatten()[at].item()!r} became {b.flatten()[at].item()!r}"
            )
    return found


def _main_param(optimizer: Any, param: torch.nn.Parameter) -> torch.Tensor:
    for models, mains in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for model_group, main_group in zip(models, mains, strict=True):
            for model_param, main in zip(model_group, main_group, strict=True):
                if model_param is param:
                    return main
    raise LookupError("the parameter has no main parameter on this rank")


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sorted(group.items()) if key != "params"}


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies on the CPU."""
    return {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}


def _bits(value: Any) -> str:
    """Return a float's bits, so that NaN and -0.0 count."""
    return struct.pack(">d", float(value)).hex() + f" ({float(value)})"
