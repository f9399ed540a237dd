"""Run an unmodified Megatron-core on a machine without a GPU.

Megatron-core names ``cuda`` in a few dozen places where any device would do. This module gives
those names a meaning on the CPU, so that the real ``DistributedOptimizer`` can be tried and tested
with gloo. It patches ``torch`` only; no line of Megatron is touched, and where CUDA is available
nothing at all is changed. It is for tests and demonstrations, never for training in earnest.

Use
---
::

    from tierstore.testing import megatron_on_cpu

    megatron_on_cpu.install_import_shims()      # before the first import of megatron
    with megatron_on_cpu.cuda_is_cpu():         # around everything that builds or trains
        ...

Megatron's random number tracker keeps states of CUDA generators. Without a GPU ask Megatron for the
tracker that keeps none: ``model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["cuda_is_cpu", "install_import_shims"]

# Where Megatron-core keeps the one module that imports triton without a guard.
_UNGUARDED_TRITON_MODULES = (
    "megatron.core.transformer.moe.ops.paged_stash",
    "megatron.core.transformer.moe.paged_stash",
)


def install_import_shims() -> None:
    """Make Megatron-core importable without triton and on Python 3.11.

    Call this before the first import of ``megatron``. Each shim stands in only for what is
    missing: ``typing.override`` (Python 3.12 has it) and the one Megatron module that imports
    triton unconditionally. Triton itself is not faked, because ``torch._inductor`` would then
    believe in it.
    """
    if torch.cuda.is_available():
        return
    if not hasattr(typing, "override"):
        import typing_extensions

        setattr(typing, "override", typing_extensions.override)  # noqa: B010
    if importlib.util.find_spec("triton") is None:
        _replace_module_that_needs_triton()


@contextlib.contextmanager
def cuda_is_cpu() -> Iterator[None]:
    """Let code that asks for the current CUDA device or stream get the CPU.

    Inside the context ``device="cuda"`` means the CPU in every call of torch, streams and events
    do nothing, and ``Tensor.type()`` answers as for a CUDA tensor, because Megatron tells
    parameters apart by that string. The context holds for the thread that entered it.

    Yields
    ------
    None
    """
    if torch.cuda.is_available():
        yield
        return
    inert = _Inert()
    stand_ins: dict[str, object] = {
        "current_device": lambda: torch.device("cpu"),
        "current_stream": lambda *_args, **_kwargs: inert,
        "stream": lambda *_args, **_kwargs: inert,
        "synchronize": lambda *_args, **_kwargs: None,
        "empty_cache": lambda: None,
        "Stream": _Inert,
        "Event": _Inert,
    }
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(_CudaMeansCpu())
        yield


def _replace_module_that_needs_triton() -> None:
    core = importlib.util.find_spec("megatron.core")
    if core is None or core.origin is None:
        return
    root = Path(core.origin).parent
    for name in _UNGUARDED_TRITON_MODULES:
        path = root.joinpath(*name.split(".")[2:]).with_suffix(".py")
        if path.exists():
            sys.modules[name] = _ModuleWithoutTriton(name)
            return


class _ModuleWithoutTriton(types.ModuleType):
    """Has every name that is asked of it; each raises when it is called."""

    def __getattr__(self, name: str) -> Callable[..., typing.NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def needs_triton(*_args: object, **_kwargs: object) -> typing.NoReturn:
            raise RuntimeError(f"{self.__name__}.{name} needs triton, which is not installed")

        return needs_triton


class _Inert:
    """Stands for a CUDA stream, an event, or the context of a stream: every method does nothing."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Inert]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: self

    def __enter__(self) -> typing.Self:
        return self

    def __exit__(self, *_args: object) -> None:
        pass


class _CudaMeansCpu(TorchFunctionMode):
    """Turns the device ``cuda`` into ``cpu`` in every call that goes through torch."""

    def __torch_function__(
        self,
        func: Callable[..., typing.Any],
        types: object,
        args: tuple[typing.Any, ...] = (),
        kwargs: dict[str, typing.Any] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron compares this with 'torch.cuda.BFloat16Tensor' and the like.
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to:
            args = tuple(_to_cpu(value) for value in args)
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        return func(*args, **kwargs)


def _to_cpu(value: object) -> object:
    """Return the CPU where `value` names a CUDA device, else `value` itself."""
    if isinstance(value, str | torch.device) and str(value).split(":")[0] == "cuda":
        return torch.device("cpu")
    return value
