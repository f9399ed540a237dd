"""Options of Megatron that would read or write optimizer state behind the tier's back.

Only what is unsafe is refused, and all of it at once, each with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tierstore.errors import ConfigError

__all__ = ["refuse_arguments", "refuse_optimizers"]


def _on(name: str) -> Callable[[Any], bool]:
    return lambda options: bool(getattr(options, name, False))


def _one_of(name: str, *values: str) -> Callable[[Any], bool]:
    return lambda options: getattr(options, name, None) in values


Rule = tuple[str, Callable[[Any], bool], str]

_TWO_OWNERS = "it moves the same optimizer state that the tier holds"
_QUANTIZED = (
    "it quantizes the whole parameter list in one collective call, and the tiers hand main params "
    "out tile by tile"
)
_DIRECT = "this checkpoint format reads optimizer.state directly, which is on the tier"

_OPTIMIZER_RULES: tuple[Rule, ...] = (
    (
        "optimizer (other than adam)",
        lambda options: getattr(options, "optimizer", "adam") != "adam",
        "only Adam's elementwise update is streamed so far",
    ),
    (
        "use_precision_aware_optimizer",
        _on("use_precision_aware_optimizer"),
        "the optimizer would hold the main params itself",
    ),
    ("optimizer_cpu_offload", _on("optimizer_cpu_offload"), _TWO_OWNERS),
    ("offload_optimizer_states", _on("offload_optimizer_states"), _TWO_OWNERS),
    ("chunked_optimizer_state_offload", _on("chunked_optimizer_state_offload"), _TWO_OWNERS),
    (
        "reuse_grad_buf_for_mxfp8_param_ag",
        _on("reuse_grad_buf_for_mxfp8_param_ag"),
        "the training loop copies resident main params into the gradient buffer",
    ),
    (
        "optimizer_cuda_graph",
        _on("optimizer_cuda_graph"),
        "a captured step can't wait for transfers",
    ),
    (
        "use_layer_wise_distributed_optimizer",
        _on("use_layer_wise_distributed_optimizer"),
        "it keeps whole matrices in another kind of optimizer",
    ),
)

_DDP_RULES: tuple[Rule, ...] = (
    ("use_megatron_fsdp", _on("use_megatron_fsdp"), "FSDP owns parameters and state itself"),
    ("use_custom_fsdp", _on("use_custom_fsdp"), "FSDP owns parameters and state itself"),
    ("fp8_param_gather", _on("fp8_param_gather"), _QUANTIZED),
    ("fp4_param_gather", _on("fp4_param_gather"), _QUANTIZED),
)

_MODEL_RULES: tuple[Rule, ...] = (
    ("fp8_param", _on("fp8_param"), _QUANTIZED),
    ("qk_clip", _on("qk_clip"), "it writes main params after the step, and they are on the tier"),
)

_ARGUMENT_RULES: tuple[Rule, ...] = (
    (
        "--use-distributed-optimizer (off)",
        lambda args: getattr(args, "use_distributed_optimizer", True) is False,
        "the tiers hold the shards that it makes",
    ),
    (
        "--log-params-norm",
        _on("log_params_norm"),
        "it reads the main params between steps, and they are on the tier",
    ),
    ("--use-torch-fsdp2", _on("use_torch_fsdp2"), "FSDP owns parameters and state itself"),
    (
        "--async-save",
        _on("async_save"),
        "the writer would read the state while the next step overwrites it",
    ),
    ("--ckpt-format", _one_of("ckpt_format", "fsdp_dtensor", "torch_dcp"), _DIRECT),
    (
        "--non-persistent-ckpt-type",
        _one_of("non_persistent_ckpt_type", "local", "in_memory"),
        "local checkpoints keep references to state tensors",
    ),
)


def _offending(options: Any, rules: Iterable[Rule]) -> list[str]:
    return [f"{name}: {reason}" for name, applies, reason in rules if applies(options)]


def _raise_if_any(found: list[str]) -> None:
    if found:
        listed = "\n".join(f"  - {line}" for line in dict.fromkeys(found))
        raise ConfigError(
            "--optimizer-state-tier can't be used as things are. Change each of these, or use "
            f"--optimizer-state-tier=none:\n{listed}"
        )


def refuse_arguments(args: Any) -> None:
    """Refuse what only Megatron's training arguments say.

    Raises
    ------
    ConfigError
        Names every offending option and the reason for each.
    """
    rules = (*_ARGUMENT_RULES, *_OPTIMIZER_RULES, *_DDP_RULES, *_MODEL_RULES)
    _raise_if_any(_offending(args, rules))


def refuse_optimizers(optimizers: Iterable[Any]) -> None:
    """Refuse what the optimizers of a chain say about themselves.

    Raises
    ------
    ConfigError
        Names every offending option and the reason for each.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    found: list[str] = []
    for optimizer in optimizers:
        if not isinstance(optimizer, DistributedOptimizer):
            found.append(
                f"{type(optimizer).__name__}: only DistributedOptimizer is supported "
                "(--use-distributed-optimizer)"
            )
            continue
        if getattr(optimizer, "tierstore_handle", None) is not None:
            found.append("attach: this optimizer's state is on a tier already")
            continue
        found += _offending(optimizer.config, _OPTIMIZER_RULES)
        found += _offending(optimizer.ddp_config, _DDP_RULES)
        for chunk in optimizer.model_chunks:
            found += _offending(getattr(chunk, "config", None), _MODEL_RULES)
        if optimizer.optimizer is not None and len(optimizer.optimizer.state):
            found.append(
                "attach after the first step: the optimizer holds state already; attach right "
                "after get_megatron_optimizer"
            )
    _raise_if_any(found)
