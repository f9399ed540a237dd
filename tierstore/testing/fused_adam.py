"""An Adam with the habits of Apex's and Transformer Engine's ``FusedAdam``, without their kernels.

``torch.optim.AdamW`` keeps its step count as a tensor in the state of every parameter. The fused
optimizers that train on GPUs keep one integer in each parameter group. Megatron takes another path
for each habit; this class makes the second one testable wherever torch runs. The arithmetic is
plain elementwise torch, the same on every slice of a parameter.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

__all__ = ["FusedAdam", "FusedSGD", "install_as_apex"]


class FusedAdam(torch.optim.Optimizer):
    """Adam with the step count in the parameter group.

    Parameters
    ----------
    params : iterable of Tensor or of dict
        What to optimize.
    lr, betas, eps, weight_decay : float
        As in ``torch.optim.AdamW``.
    bias_correction : bool
        Whether to correct the moments for their start at zero.
    adam_w_mode : bool
        Decoupled weight decay; otherwise the decay is added to the gradient. Like in the fused
        optimizers it belongs to the object and to no group.
    set_grad_none : bool
        Kept for the signature; ``zero_grad`` is torch's.
    amsgrad, capturable, master_weights : bool
        Part of the signature of the fused optimizers; only False is accepted.

    Raises
    ------
    ValueError
        If one of `amsgrad`, `capturable`, `master_weights` is set.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad or capturable or master_weights:
            raise ValueError("FusedAdam has no amsgrad, capturable or master_weights mode here")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        A group without parameters keeps its step count, as with the fused optimizers; a group
        whose parameters have no gradient advances it.

        Parameters
        ----------
        closure : callable, optional
            Evaluated first if given.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        correction1 = correction2 = 1.0
        if group["bias_correction"]:
            correction1 = 1 - beta1 ** group["step"]
            correction2 = 1 - beta2 ** group["step"]
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        if not self.adam_w_mode:
            grad = grad + group["weight_decay"] * param
        exp_avg = state["exp_avg"].mul_(beta1).add_(grad * (1 - beta1))
        exp_avg_sq = state["exp_avg_sq"].mul_(beta2).add_(grad * grad * (1 - beta2))
        update = (exp_avg / correction1) / ((exp_avg_sq / correction2).sqrt() + group["eps"])
        if self.adam_w_mode:
            update = update + group["weight_decay"] * param
        param.sub_(update * group["lr"])


class FusedSGD(torch.optim.SGD):
    """torch's SGD under the name that Megatron imports beside ``FusedAdam``."""


def install_as_apex() -> None:
    """Let ``from apex.optimizers import FusedAdam`` find the classes of this module.

    Only ``apex.optimizers`` is registered: with an ``apex`` to import, Megatron would also ask for
    Apex's fused layer norm. Call this before the first import of ``megatron``.

    Raises
    ------
    RuntimeError
        If Megatron has already chosen its optimizer, or Apex itself is loaded.
    """
    if "megatron.core.optimizer" in sys.modules:
        raise RuntimeError("install_as_apex() comes too late: megatron.core.optimizer is imported")
    if "apex" in sys.modules:
        raise RuntimeError("install_as_apex() would hide the real Apex, which is imported")
    module = types.ModuleType("apex.optimizers", "Stand-in made by tierstore.testing.fused_adam.")
    module.__spec__ = importlib.machinery.ModuleSpec("apex.optimizers", None)
    vars(module).update(FusedAdam=FusedAdam, FusedSGD=FusedSGD)
    sys.modules["apex.optimizers"] = module
