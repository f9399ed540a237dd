"""What lets Megatron-core run without a GPU, and the optimizer with the habits of Apex."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tierstore.testing import fused_adam, megatron_on_cpu
from tierstore.testing.fused_adam import FusedAdam

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the shims are inert with CUDA")


@without_cuda
def test_cuda_means_cpu_inside_the_context_only() -> None:
    weight = torch.zeros(3, dtype=torch.bfloat16)
    with megatron_on_cpu.cuda_is_cpu():
        assert torch.zeros(2, device="cuda").device == torch.device("cpu")
        assert torch.tensor([1.0], device=torch.device("cuda", 0)).device == torch.device("cpu")
        assert weight.to("cuda:0", torch.float32).dtype == torch.float32
        assert weight.cuda() is weight
        assert weight.type() == "torch.cuda.BFloat16Tensor"
        assert weight.type(torch.float16).dtype == torch.float16
        assert torch.empty(1, device=torch.cuda.current_device()).device == torch.device("cpu")
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
            torch.cuda.Event(enable_timing=True).record()
        torch.cuda.synchronize()
    assert weight.type() == "torch.BFloat16Tensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


@without_cuda
def test_the_module_that_needs_triton_imports_and_fails_when_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needy = tmp_path / "megatron" / "core" / "transformer" / "moe" / "paged_stash.py"
    needy.parent.mkdir(parents=True)
    needy.write_text("import triton\n")
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("")
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", _find_no_triton(importlib.util.find_spec))
    before = set(sys.modules)
    try:
        megatron_on_cpu.install_import_shims()
        stub = importlib.import_module("megatron.core.transformer.moe.paged_stash")
        with pytest.raises(RuntimeError, match="needs triton"):
            stub.paged_stash_kernel()
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]


def _find_no_triton(find_spec: Callable[..., Any]) -> Callable[..., Any]:
    return lambda name, *rest: None if name == "triton" else find_spec(name, *rest)


@pytest.mark.parametrize("decoupled", [True, False])
def test_fused_adam_does_the_arithmetic_of_torch(decoupled: bool) -> None:
    start = torch.linspace(-1, 1, 300)
    mine, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    knobs: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    fused = FusedAdam([mine], adam_w_mode=decoupled, **knobs)
    plain = (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], **knobs)
    for step in range(5):
        mine.grad = torch.sin(start * (step + 3))
        theirs.grad = mine.grad.clone()
        fused.step()
        plain.step()
    torch.testing.assert_close(mine, theirs)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(fused.state[mine][name], plain.state[theirs][name])


def test_fused_adam_counts_steps_in_groups_that_have_parameters() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    groups: list[dict[str, Any]] = [{"params": [param]}, {"params": []}]
    optimizer = FusedAdam(groups)
    optimizer.step()
    optimizer.step()
    assert [group.get("step") for group in optimizer.param_groups] == [2, None]
    assert not optimizer.state[param]


def test_fused_adam_refuses_what_it_can_not_do() -> None:
    with pytest.raises(ValueError, match="amsgrad"):
        FusedAdam([torch.nn.Parameter(torch.ones(2))], amsgrad=True)


def test_fused_adam_is_found_as_apex_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("apex", "apex.optimizers", "megatron.core.optimizer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "apex.optimizers", types.ModuleType("replaced"))
    fused_adam.install_as_apex()
    assert importlib.import_module("apex.optimizers").FusedAdam is FusedAdam
    assert "apex" not in sys.modules
    for name in ("apex", "megatron.core.optimizer"):
        with monkeypatch.context() as context:
            context.setitem(sys.modules, name, types.ModuleType(name))
            with pytest.raises(RuntimeError):
                fused_adam.install_as_apex()
