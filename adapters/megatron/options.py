"""Every option of Megatron that has to do with optimizer state: it works, or is refused and why.

The guards, the page ``docs/OPTIONS.md`` and the tests are made from this one table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["OPTIONS", "Option", "page"]

_REFUSED = "tests/megatron/test_options.py::test_a_refused_option_is_refused"
_TRAINED = "tests/megatron/test_bit_equal.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One row of the table.

    Parameters
    ----------
    name
        As the user writes it: a flag, or what else has the condition.
    condition
        Which of its values the row is about, in words.
    works
        Whether training goes on as without a tier; else it is refused at start.
    reason
        Why it is unsafe, or why it works.
    test
        What shows it: a test function, or, as ``file: field=value``, cases of the bit-for-bit
        comparison.
    found
        Says of something that has options as attributes whether the condition holds.
    on
        Where the option is found besides the training arguments: ``optimizer`` (its config),
        ``ddp`` (its config), ``model`` (its config) or ``parameter``.
    example
        Attributes for which the condition holds.
    """

    name: str
    condition: str
    works: bool
    reason: str
    test: str
    found: Callable[[Any], bool] = lambda options: False
    on: str = "arguments"
    example: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """One line of an error."""
        return f"{self.name} ({self.condition}): {self.reason}"


def _refused(
    name: str,
    reason: str,
    *,
    on: str = "arguments",
    attribute: str = "",
    values: tuple[Any, ...] = (),
    condition: str = "on",
) -> Option:
    """A row that is refused for some values of an attribute, or for all that are not false."""
    attribute = attribute or name.lstrip("-").replace("-", "_")

    def found(options: Any) -> bool:
        value = getattr(options, attribute, None)
        return value in values if values else bool(value)

    return Option(
        name=name,
        condition=condition,
        works=False,
        reason=reason,
        test=_REFUSED,
        found=found,
        on=on,
        example={attribute: values[0] if values else True},
    )


def _works(name: str, condition: str, reason: str, test: str) -> Option:
    return Option(name=name, condition=condition, works=True, reason=reason, test=test)


def _trained(name: str, condition: str, which: str, reason: str) -> Option:
    """A row that works because runs with it are equal, bit for bit, with and without a tier."""
    return _works(name, condition, reason, f"{_TRAINED}: {which}")


_TWO_OWNERS = "it moves the same optimizer state that the tier holds"
_FSDP = "FSDP owns parameters and optimizer state itself"
_QUANTIZED = (
    "it quantizes the whole parameter list in one collective call, and the tiers hand main params "
    "out tile by tile"
)
_DIRECT = "this format reads optimizer.state directly, and the state is on the tier"
_REFERENCES = "it keeps references to state tensors, which the next step overwrites"
_WALKS = "it walks main params and moments in memory, and they are on the tier"
_OWN_STEP = "Megatron's own step runs as it is, and asks the tier only for the update"
_GROUPS = "every value comes from the live param groups at each step"
_LAYOUT = "the tiers take each rank's shards from the buffers, whatever made them so"
_FUNNEL = "Megatron reads and writes each parameter's state by two methods, which go to the tier"

_NOT_ADAM = Option(
    name="--optimizer",
    condition="anything but adam: sgd, lion, muon and others",
    works=False,
    reason="only Adam's elementwise update with its two moments is streamed so far",
    test=_REFUSED,
    found=lambda options: getattr(options, "optimizer", "adam") != "adam",
    on="optimizer",
    example={"optimizer": "sgd"},
)

_NOT_DISTRIBUTED = Option(
    name="--use-distributed-optimizer",
    condition="off",
    works=False,
    reason="the tiers hold the shards that it makes",
    test=_REFUSED,
    found=lambda options: getattr(options, "use_distributed_optimizer", True) is False,
    example={"use_distributed_optimizer": False},
)

_QUANTIZED_PARAMETERS = Option(
    name="fp8, mxfp8 or fp4 parameters",
    condition="a parameter is of a quantized type",
    works=False,
    reason=_QUANTIZED,
    test=_REFUSED,
    found=lambda parameter: any(
        kind.__name__ in ("QuantizedTensor", "QuantizedTensorBase", "Float8Tensor")
        for kind in type(getattr(parameter, "data", parameter)).__mro__
    ),
    on="parameter",
)

_CELLS_THAT_RESUME = Option(
    name="--indep-dp",
    condition="with --optimizer-state-resume and the default --optimizer-state-role",
    works=False,
    reason=(
        "ranks have the same numbers in every cell, so that a cell could take up another one's "
        "state: give each cell a role of its own"
    ),
    test=_REFUSED,
    found=lambda options: (
        bool(getattr(options, "indep_dp", False))
        and getattr(options, "optimizer_state_resume", "never") != "never"
        and getattr(options, "optimizer_state_role", "train") == "train"
    ),
    example={"indep_dp": True, "optimizer_state_resume": "auto"},
)

_REFUSALS = (
    _NOT_DISTRIBUTED,
    _NOT_ADAM,
    _refused(
        "use_layer_wise_distributed_optimizer",
        "it keeps whole matrices in another kind of optimizer",
        on="optimizer",
    ),
    _refused(
        "--use-precision-aware-optimizer",
        "the optimizer would hold the main params itself",
        on="optimizer",
    ),
    _refused("--optimizer-cpu-offload", _TWO_OWNERS, on="optimizer"),
    _refused("--offload-optimizer-states", _TWO_OWNERS, on="optimizer"),
    _refused("--chunked-optimizer-state-offload", _TWO_OWNERS, on="optimizer"),
    _refused("--optimizer-cuda-graph", "a captured step can't wait for transfers", on="optimizer"),
    _refused("--use-megatron-fsdp", _FSDP, on="ddp"),
    _refused("--use-custom-fsdp", _FSDP, on="ddp"),
    _refused("--use-torch-fsdp2", _FSDP),
    _refused("--fp8-param-gather", _QUANTIZED, on="ddp"),
    _refused("--fp4-param-gather", _QUANTIZED, on="ddp"),
    _refused("fp8_param", _QUANTIZED, on="model"),
    _QUANTIZED_PARAMETERS,
    _refused(
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "the training loop copies resident main params into the gradient buffer",
        on="optimizer",
    ),
    _refused(
        "--qk-clip",
        "it writes main params after the step, and they are on the tier",
        on="model",
    ),
    _refused(
        "--log-params-norm",
        "it reads all main params at once between steps, and they are on the tier",
    ),
    _refused("--save-local-weight-checksum", _WALKS),
    _refused("--enable-witness", _WALKS),
    _refused(
        "--reset-optimizer-states",
        "it zeroes moments in memory, finds none there and would do nothing, in silence",
    ),
    _refused(
        "--lora-rank",
        "the adapter is saved and loaded past Megatron's checkpoints, without main params: the "
        "first step after a load would undo it",
        values=tuple(range(1, 4097)),
        condition="more than 0, saved by the trainer itself",
    ),
    _refused(
        "--ckpt-format",
        _DIRECT,
        values=("fsdp_dtensor", "torch_dcp", "zarr"),
        condition="fsdp_dtensor, torch_dcp or zarr",
    ),
    _refused(
        "--non-persistent-ckpt-type",
        _REFERENCES,
        values=("local", "in_memory"),
        condition="local or in_memory",
    ),
    _refused("--async-save", "the writer would read the state while the next step overwrites it"),
    _CELLS_THAT_RESUME,
)

_WORKING = (
    _trained("--bf16", "on", "dtype=bf16", "main params are built from the weights"),
    _trained(
        "--fp16",
        "on, with a dynamic loss scale",
        "dtype=fp16",
        "a step that overflows is skipped before the tier is asked for anything",
    ),
    _trained("fp32 training", "neither --bf16 nor --fp16", "dtype=fp32", _OWN_STEP),
    _trained(
        "fp32 parameters among others",
        "a router, an embedding",
        "params=fp32",
        "the weight is its own main param, and the tier keeps a shadow of it",
    ),
    _trained(
        "--accumulate-allreduce-grads-in-fp32",
        "on",
        "grads=fp32",
        "the update reads Megatron's main grads, which are views of the buffer",
    ),
    _trained(
        "--accumulate-allreduce-grads-in-fp32",
        "off",
        "grads=native",
        "Megatron copies this rank's part of the gradients to fp32, and a warning says how much",
    ),
    _trained("--overlap-grad-reduce", "on", "overlap=True", _LAYOUT),
    _trained("--overlap-grad-reduce", "off", "overlap=False", _LAYOUT),
    _trained("--overlap-param-gather", "on", "overlap=True", _LAYOUT),
    _trained("--overlap-param-gather", "off", "overlap=False", _LAYOUT),
    _trained("--clip-grad", "a norm", "clip=True", _OWN_STEP),
    _trained("--clip-grad", "0", "clip=False", _OWN_STEP),
    _trained("--log-num-zeros-in-grad", "on", "steps=10", "gradients stay where Megatron has them"),
    _trained("--decoupled-weight-decay", "on", "decay=groups", _GROUPS),
    _trained("--decoupled-weight-decay", "off", "decay=l2", _GROUPS),
    _trained("--lr-decay-style", "cosine or constant", "schedule=cosine", _GROUPS),
    _trained("betas that change", "every step", "schedule=betas", _GROUPS),
    _trained(
        "--use-checkpoint-opt_param-scheduler",
        "on",
        "fault=restart",
        "the schedule writes into the live param groups, before or after the state is loaded",
    ),
    _trained("several micro-batches", "gradient accumulation", "micro_batches=4", _OWN_STEP),
    _trained("data parallelism", "2 ranks", "parallel=dp2", _LAYOUT),
    _trained("--tensor-model-parallel-size", "2", "parallel=tp2", _LAYOUT),
    _trained(
        "--expert-model-parallel-size",
        "2",
        "parallel=ep2",
        "each optimizer of the chain has arrays of its own, committed together",
    ),
    _trained("--num-experts", "mixture of experts", "model=moe", _LAYOUT),
    _trained("tied embeddings", "one tensor for input and output", "model=gpt", _LAYOUT),
    _trained(
        "unused parameters",
        "no gradient comes",
        "params=unused",
        "their state is carried over, with the step counter the optimizer gives them",
    ),
    _trained(
        "--finetune, --no-load-optim, MoE upcycling",
        "weights are loaded and reload_model_params is called",
        "interlude=reload",
        "main params on the tier are written anew from the weights",
    ),
    _trained("optimizer state loaded by parameter", "checkpoints", "interlude=load", _FUNNEL),
)

OPTIONS: tuple[Option, ...] = (*_WORKING, *_REFUSALS)


def page() -> str:
    """The table as a page of Markdown."""
    lines = [
        "# Megatron's options with tiered optimizer state",
        "",
        "Made from `adapters/megatron/options.py` by `make docs`; a test holds the two together.",
        "What is refused is refused at start, all at once, because it is unsafe with the state on",
        "a tier; nothing is refused for another reason, and no option has to be paired with one.",
        "What is not listed does not touch optimizer state, or was not looked at.",
        "",
    ]
    for title, works in (("Works", True), ("Refused", False)):
        lines += [f"## {title}", "", "| option | condition | why | test |", "|---|---|---|---|"]
        for option in OPTIONS:
            if option.works == works:
                cells = (f"`{option.name}`", option.condition, option.reason, f"`{option.test}`")
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)
