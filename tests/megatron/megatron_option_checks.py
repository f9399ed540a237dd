"""What `attach` says of each refused option on a real Megatron; prints a JSON object of lines."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tierstore.testing import megatron_on_cpu

megatron_on_cpu.install_import_shims()

import torch
from megatron.core import parallel_state
from megatron_cases import Recipe
from megatron_training import Trainer

from tierstore.adapters import megatron as tiers
from tierstore.adapters.megatron.guards import refuse_arguments
from tierstore.adapters.megatron.options import OPTIONS, Option
from tierstore.config import TierConfig
from tierstore.errors import ConfigError


class Float8Tensor(torch.Tensor):
    """Stands for Transformer Engine's, which needs a GPU."""


@contextmanager
def switched_on(option: Option, trainer: Trainer) -> Iterator[Any]:
    """Set the option where Megatron has it; yields arguments for what only those say."""
    (optimizer,) = trainer.distributed_optimizers()
    if option.on == "parameter":
        weight = trainer.model.module.mix.weight
        quantized = torch.nn.Parameter(weight.detach().clone().as_subclass(Float8Tensor))
        with mock.patch.dict(trainer.model.module.mix._parameters, weight=quantized):
            yield None
        return
    holder = {
        "optimizer": optimizer.config,
        "ddp": optimizer.ddp_config,
        "model": trainer.model.config,
        "arguments": SimpleNamespace(),
    }[option.on]
    patches = [mock.patch.object(holder, *pair, create=True) for pair in option.example.items()]
    for patch in patches:
        patch.start()
    yield holder if option.on == "arguments" else None
    for patch in reversed(patches):
        patch.stop()


def said(option: Option, trainer: Trainer) -> list[str]:
    with switched_on(option, trainer) as arguments:
        try:
            if arguments is None:
                tiers.attach(trainer.optimizer, TierConfig(tier="cpu"))
            else:
                refuse_arguments(arguments)
        except ConfigError as error:
            return [line for line in str(error).splitlines() if line.startswith("  - ")]
    return ["it was not refused"]


def main() -> None:
    directory = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    with megatron_on_cpu.cuda_is_cpu():
        torch.distributed.init_process_group(
            "gloo", init_method=(directory / "rendezvous").as_uri(), rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
        trainer = Trainer(Recipe(), torch.device("cpu"))
        found = {option.line: said(option, trainer) for option in OPTIONS if not option.works}
        trainer.train()  # none of the attempts has changed anything
    print(json.dumps(found))


if __name__ == "__main__":
    main()
