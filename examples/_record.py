"""What a run leaves for a comparison: losses, weights, optimizer state, counters.

Everything is taken through Megatron's own accessors, which are the same with and without
tierstore: for a tiered run they read the state back from the tier.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from examples._bits import sha256
from tierstore.adapters.megatron import Handle


class DeviceMemory:
    """Device memory that the optimizer state holds.

    On CUDA: what is allocated within `measured` blocks and not given back. On the CPU, where there
    is no such counter: the tensors that the optimizer object holds, plus the window.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.how = (
            "measured by CUDA's allocator" if self._cuda else "computed from the tensors held"
        )
        self._allocated_nbytes = 0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Count what is allocated in the block and outlives it."""
        if not self._cuda:
            yield
            return
        before_nbytes = torch.cuda.memory_allocated()
        yield
        self._allocated_nbytes += torch.cuda.memory_allocated() - before_nbytes

    def held_nbytes(self, optimizer: MegatronOptimizer, window_nbytes: int) -> int:
        """Return the state's bytes; `window_nbytes` is 0 without tierstore."""
        if self._cuda:
            return self._allocated_nbytes
        storages: dict[int, int] = {}  # by address: a storage with several views counts once
        for part in optimizer_parts(optimizer):
            inner = part.optimizer
            mains = [main for group in inner.param_groups for main in group["params"]]
            states = [value for main in mains for value in inner.state.get(main, {}).values()]
            for tensor in (*mains, *(s for s in states if isinstance(s, torch.Tensor))):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values()) + window_nbytes


def optimizer_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the `DistributedOptimizer`s of what `get_megatron_optimizer` gave."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not part.is_stub_optimizer]


def weights(model: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Return a copy of every weight of this rank's model."""
    return {name: weight.detach().to("cpu", copy=True) for name, weight in model.named_parameters()}


def state(model: DistributedDataParallel, optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Return a copy of this rank's shard of the state, keyed ``parameter/kind``."""
    names = {weight: name for name, weight in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    for part in optimizer_parts(optimizer):
        for group in (*part.model_float16_groups, *part.model_fp32_groups):
            for weight in group:
                for kind, value in part._get_main_param_and_optimizer_states(weight).items():
                    tensors[f"{names[weight]}/{kind}"] = (
                        torch.as_tensor(value).detach().to("cpu", copy=True)
                    )
        # Apex and Transformer Engine keep the step in the group, torch keeps it in the state.
        for index, group in enumerate(part.optimizer.param_groups):
            if "step" in group:
                tensors[f"group-{index}/step"] = torch.as_tensor(group["step"]).to("cpu", copy=True)
    return tensors


def take(
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    handle: Handle | None,
    *,
    losses: list[float],
    memory: DeviceMemory,
    steps_per_s: float,
) -> dict[str, Any]:
    """Return this rank's record; `handle` is None without tierstore."""
    record: dict[str, Any] = {
        "losses": losses,
        "steps_per_s": steps_per_s,
        "held_nbytes": memory.held_nbytes(optimizer, handle.window_nbytes if handle else 0),
        "held_how": memory.how,
        # The counters before the state is read back below, so that they can not profit from it.
        "streamed_steps": handle.steps if handle else 0,
        "read_nbytes": handle.read_nbytes if handle else 0,
        "written_nbytes": handle.written_nbytes if handle else 0,
        "store": str(handle.root) if handle and handle.root else None,
    }
    record["weights"] = weights(model)
    record["state"] = state(model, optimizer)
    record["weights_sha256"] = sha256(record["weights"])
    record["state_sha256"] = sha256(record["state"])
    return record


def summary(record: dict[str, Any]) -> str:
    """Return one line to compare by eye."""
    return (
        f"weights {record['weights_sha256'][:16]} state {record['state_sha256'][:16]}"
        f" streamed steps {record['streamed_steps']}"
        f" read {record['read_nbytes'] / 2**20:.1f} MiB"
        f" written {record['written_nbytes'] / 2**20:.1f} MiB"
        f" held {record['held_nbytes'] / 2**20:.1f} MiB ({record['held_how']})"
        f" {record['steps_per_s']:.2f} steps/s"
    )


def path_of_rank(path: Path, rank: int) -> Path:
    """Return the dump of one rank: ``run.pt`` becomes ``run.rank-00003.pt``."""
    return path.with_name(f"{path.stem}.rank-{rank:05d}{path.suffix}")
