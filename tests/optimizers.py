"""torch's optimizers by what is right for them, and toys that can't be cut into tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from tierstore.testing.fused_adam import FusedAdam
from tierstore.update import CUT_NUMEL

__all__ = [
    "ADAM",
    "EITHER",
    "NEEDS_ALL_GRADIENTS",
    "REFUSED",
    "STUDIED",
    "Make",
    "bits",
    "make_groups",
    "parameters",
]

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# Elements of each group's parameters: enough for torch to use its threads, one, a vector's tail.
SIZES = ((40_000, 1, 700), (63, 4097))

ADAM = ("exp_avg", "exp_avg_sq")
AMSGRAD = (*ADAM, "max_exp_avg_sq")
STEP = ("step",)


class Toy(torch.optim.Optimizer):
    """An optimizer in one line: a subclass says what happens to a parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param])

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(grad, alpha=0.1)


class TrustRatio(Toy):
    def update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(grad * (param.norm() / grad.norm().clamp_min(1e-6)))


class Neighbours(Toy):
    def update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(grad + grad.roll(1), alpha=0.1)


class IntegerStep(Toy):
    def update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        param.sub_(grad, alpha=0.1 / state["step"])


class NewState(Toy):
    """Assigns a dictionary of its own instead of filling the one that is there."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        if not self.state[param]:
            self.state[param] = {"m": torch.zeros_like(param)}
        self.state[param] = {"m": self.state[param]["m"] * 0.9 + grad}
        param.sub_(self.state[param]["m"], alpha=0.1)


class NarrowMoment(Toy):
    def update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.bfloat16)
        param.sub_(state["exp_avg"].mul_(0.9).add_(grad), alpha=0.1)


class Halves(Toy):
    def update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        state["half"] = grad[::2].clone()
        param.sub_(grad, alpha=0.1)


class OwnCounter(Toy):
    """Its step count is an attribute: every call of ``step`` is a step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(grad, alpha=0.1 / self.count)


class LargestGradient(Toy):
    """Clips by the largest gradient of all parameters together, as LAMB does by their norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pairs = [(param, param.grad) for group in self.param_groups for param in group["params"]]
        grads = [(param, grad) for param, grad in pairs if grad is not None]
        largest = max((float(grad.abs().max()) for _, grad in grads), default=1.0)
        for param, grad in grads:
            param.sub_(grad, alpha=0.1 / largest)


class TensorStep(Toy):
    """Apex's ``capturable`` habit: the group's step count is a tensor, and counted up in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = torch.tensor(1)
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / group["step"])


class LoadedTensorStep(TensorStep):
    """The same after a checkpoint was loaded: the count is there before the first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["step"] = torch.tensor(10)


class Noise(Toy):
    def update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(grad * torch.rand_like(grad), alpha=0.1)


def muon(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Muon([param.view(-1, 1) for param in groups[0]["params"]])


def lbfgs(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(groups[0]["params"])


# What is right: factory, arrays, scalars, cut_numel.
STUDIED: dict[str, tuple[Make, tuple[str, ...], tuple[str, ...], int]] = {
    "adam": (partial(torch.optim.Adam), ADAM, STEP, 1),
    "adam-amsgrad": (partial(torch.optim.Adam, amsgrad=True), AMSGRAD, STEP, 1),
    "adam-foreach": (partial(torch.optim.Adam, foreach=True), ADAM, STEP, 1),
    "adam-for": (partial(torch.optim.Adam, foreach=False), ADAM, STEP, 1),
    "adam-fused": (partial(torch.optim.Adam, fused=True), ADAM, STEP, CUT_NUMEL),
    "adam-maximize": (partial(torch.optim.Adam, maximize=True), ADAM, STEP, 1),
    "adamw": (partial(torch.optim.AdamW), ADAM, STEP, 1),
    "adamw-amsgrad": (
        partial(torch.optim.AdamW, amsgrad=True, foreach=True),
        AMSGRAD,
        STEP,
        1,
    ),
    "adamw-foreach": (partial(torch.optim.AdamW, foreach=True), ADAM, STEP, 1),
    "adamw-for": (partial(torch.optim.AdamW, foreach=False), ADAM, STEP, 1),
    "adamw-fused": (partial(torch.optim.AdamW, fused=True), ADAM, STEP, CUT_NUMEL),
    "adamw-fused-amsgrad": (
        partial(torch.optim.AdamW, fused=True, amsgrad=True, maximize=True),
        AMSGRAD,
        STEP,
        CUT_NUMEL,
    ),
    "adamw-maximize": (partial(torch.optim.AdamW, maximize=True, foreach=True), ADAM, STEP, 1),
    "adamw-tensor-lr": (
        lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), foreach=False),
        ADAM,
        STEP,
        1,
    ),
    "adadelta": (partial(torch.optim.Adadelta), ("square_avg", "acc_delta"), STEP, 1),
    "adamax": (partial(torch.optim.Adamax), ("exp_avg", "exp_inf"), STEP, 1),
    "fused-adam": (partial(FusedAdam, weight_decay=0.01), ADAM, (), 1),
    "fused-adam-l2": (
        partial(FusedAdam, adam_w_mode=False, bias_correction=False, weight_decay=0.01),
        ADAM,
        (),
        1,
    ),
    "new-state": (NewState, ("m",), (), 1),
    "radam": (partial(torch.optim.RAdam, decoupled_weight_decay=True), ADAM, STEP, 1),
    "rmsprop": (partial(torch.optim.RMSprop), ("square_avg",), STEP, 1),
    "rmsprop-centered": (
        partial(torch.optim.RMSprop, momentum=0.9, centered=True),
        ("square_avg", "momentum_buffer", "grad_avg"),
        STEP,
        1,
    ),
    "rmsprop-momentum": (
        partial(torch.optim.RMSprop, momentum=0.9, foreach=True),
        ("square_avg", "momentum_buffer"),
        STEP,
        1,
    ),
    "sgd": (partial(torch.optim.SGD, lr=0.1), (), (), 1),
}

# Elementwise as well, but with a start that not everybody can lay out, or with kernels that not
# every build has: right or refused.
EITHER: dict[str, Make] = {
    "adagrad": partial(torch.optim.Adagrad, lr_decay=0.1),
    "adagrad-foreach": partial(torch.optim.Adagrad, foreach=True),
    "adagrad-fused": partial(torch.optim.Adagrad, fused=True),
    "adagrad-start": partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "adam-capturable": partial(torch.optim.Adam, capturable=True),
    "adamw-capturable-foreach": partial(torch.optim.AdamW, capturable=True, foreach=True),
    "asgd": partial(torch.optim.ASGD),
    "nadam": partial(torch.optim.NAdam),
    "nadam-foreach": partial(torch.optim.NAdam, foreach=True),
    "rprop": partial(torch.optim.Rprop),
    "sgd-dampening": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "sgd-fused": partial(torch.optim.SGD, lr=0.1, fused=True),
    "sgd-fused-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd-momentum-foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "sgd-nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-mixed": lambda groups: torch.optim.SGD(
        [groups[0], {**groups[1], "momentum": 0.9}], lr=0.1
    ),
    "sgd-mixed-reversed": lambda groups: torch.optim.SGD(
        [{**groups[0], "momentum": 0.9}, groups[1]], lr=0.1
    ),
    "adamw-mixed-amsgrad": lambda groups: torch.optim.AdamW(
        [groups[0], {**groups[1], "amsgrad": True}]
    ),
    "tensor-step-in-group": TensorStep,
    "tensor-step-loaded": LoadedTensorStep,
}

REFUSED: dict[str, Make] = {
    "adafactor": partial(torch.optim.Adafactor),
    "adafactor-foreach": partial(torch.optim.Adafactor, foreach=True),
    # A schedule that starts at 0 must not hide that the update is not elementwise.
    "adafactor-lr-0": partial(torch.optim.Adafactor, lr=0),
    "adafactor-lr-0.0": partial(torch.optim.Adafactor, lr=0.0),
    "adafactor-lr-tensor-0": lambda groups: torch.optim.Adafactor(groups, lr=torch.tensor(0.0)),
    "halves": Halves,
    "integer-step": IntegerStep,
    "largest-gradient": LargestGradient,
    "lbfgs": lbfgs,
    "muon": muon,
    "narrow-moment": NarrowMoment,
    "neighbours": Neighbours,
    "noise": Noise,
    "own-counter": OwnCounter,
    "sparse-adam": partial(torch.optim.SparseAdam),
    "trust-ratio": TrustRatio,
}
if not hasattr(torch.optim, "Muon"):
    del REFUSED["muon"]

# torch's own step fails where a parameter has no gradient in the first step.
NEEDS_ALL_GRADIENTS = frozenset({"sgd-fused-momentum"})


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def make_groups(rng: np.random.Generator) -> list[dict[str, Any]]:
    return [
        {"params": [torch.from_numpy(rng.normal(size=n).astype(np.float32)) for n in sizes]}
        for sizes in SIZES
    ]


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
