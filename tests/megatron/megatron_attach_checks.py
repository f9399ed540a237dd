"""Checks of `attach` on one rank of a real Megatron; prints a JSON object of what failed."""

from __future__ import annotations

import json
import math
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tierstore.testing import megatron_on_cpu

megatron_on_cpu.install_import_shims()

import torch
from megatron.core import parallel_state
from megatron_cases import Recipe
from megatron_training import Trainer

from tierstore.adapters import megatron as tiers
from tierstore.backends.posix import PosixStore
from tierstore.config import TierConfig
from tierstore.errors import ConfigError, StateError, TierStoreError, TransferError

CPU = torch.device("cpu")


def check(condition: object, what: object) -> None:
    if not condition:
        raise AssertionError(str(what))


def refusal(action: Callable[[], Any], kind: type[TierStoreError]) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def a_second_attach(directory: Path) -> None:
    trainer = Trainer(Recipe(), CPU)
    with tiers.attach(trainer.optimizer, TierConfig(tier="cpu")):
        said = refusal(lambda: tiers.attach(trainer.optimizer, TierConfig(tier="cpu")), ConfigError)
        check("already" in said, said)


def after_the_first_step(directory: Path) -> None:
    trainer = Trainer(Recipe(), CPU)
    trainer.train()
    said = refusal(lambda: tiers.attach(trainer.optimizer, TierConfig(tier="cpu")), ConfigError)
    check("right after get_megatron_optimizer" in said, said)


def options_of_the_optimizer(directory: Path) -> None:
    trainer = Trainer(Recipe(), CPU)
    (optimizer,) = trainer.distributed_optimizers()
    unsafe = ["use_precision_aware_optimizer", "optimizer_cpu_offload", "optimizer_cuda_graph"]
    for name in unsafe:
        setattr(optimizer.config, name, True)
    optimizer.ddp_config.fp8_param_gather = True
    trainer.model.config.qk_clip = True
    said = refusal(lambda: tiers.attach(trainer.optimizer, TierConfig(tier="cpu")), ConfigError)
    for name in [*unsafe, "fp8_param_gather", "qk_clip"]:
        check(f"- --{name.replace('_', '-')} (on): " in said, said)
    check("step" not in vars(optimizer.optimizer), "the inner step was replaced")


def a_failed_attach_leaves_everything(directory: Path) -> None:
    trainer = Trainer(Recipe(), CPU)
    (optimizer,) = trainer.distributed_optimizers()
    small = TierConfig(tier="nvme", directories=(directory,), host_memory_nbytes=1000)
    refusal(lambda: tiers.attach(trainer.optimizer, small), ConfigError)
    check(not list(directory.rglob("rank-*")), list(directory.rglob("*")))
    check(not optimizer.optimizer.state, "state was put into the optimizer")
    for groups in optimizer.shard_fp32_from_float16_groups:
        for main in groups:
            check(not main.isnan().any(), "main params were let go of")
    trace = trainer.train()
    check(trace.updates == 10, trace.updates)


def an_attach_that_fails_late_leaves_everything(directory: Path) -> None:
    trainer = Trainer(Recipe(), CPU)
    (optimizer,) = trainer.distributed_optimizers()

    def fail(self: PosixStore, commit: Any) -> None:
        raise TransferError(5, "this drive was told to fail")

    config = TierConfig(tier="nvme", directories=(directory,))
    with mock.patch.object(PosixStore, "_commit", fail):
        refusal(lambda: tiers.attach(trainer.optimizer, config), TransferError)
    check(not list(directory.rglob("rank-*")), list(directory.rglob("*")))
    check(not optimizer.optimizer.state, "state was put into the optimizer")
    trace = trainer.train()
    check(trace.updates == 10, trace.updates)


def what_is_left_in_place_of_main_params(directory: Path) -> None:
    trainer = Trainer(Recipe(), CPU)
    (optimizer,) = trainer.distributed_optimizers()
    shapes = [tuple(p.shape) for g in optimizer.optimizer.param_groups for p in g["params"]]
    with tiers.attach(trainer.optimizer, TierConfig(tier="cpu")):
        mains = [p for g in optimizer.optimizer.param_groups for p in g["params"]]
        check([tuple(main.shape) for main in mains] == shapes, "shapes changed")
        for main in mains:
            check(main.untyped_storage().nbytes() == 4, main.untyped_storage().nbytes())
            check(math.isnan(main.flatten()[-1]), "a main param on the tier reads as a number")
            try:
                main.add_(1.0)
            except RuntimeError:
                continue
            check(main.numel() == 1, "a main param on the tier can be written")
        check(len(optimizer.optimizer.state) == len(mains), "the state must never be empty")
        check(trainer.optimizer.state_dict()["optimizer"]["param_groups"], "no groups")
        trainer.train()
        trainer.optimizer.offload_to_cpu()
        trainer.optimizer.restore_from_cpu()
        check(all(main.untyped_storage().nbytes() == 4 for main in mains), "made whole again")


def a_closed_handle(directory: Path) -> None:
    trainer = Trainer(Recipe(), CPU)
    tiers.attach(trainer.optimizer, TierConfig(tier="nvme", directories=(directory,))).close()
    check("is closed" in refusal(trainer.train, StateError), "another reason")


def a_snapshot_after_training(directory: Path) -> None:
    import numpy as np
    import zarr

    trainer = Trainer(Recipe(), CPU)
    with tiers.attach(trainer.optimizer, TierConfig(tier="cpu", tile_numel=1024)) as handle:
        trainer.train()
        handle.snapshot(directory / "kept")
        name, optimizer, param = next(iter(trainer.shards()))
        state = optimizer._get_main_param_and_optimizer_states(param)
        about = json.loads((directory / "kept/rank-00000/zarr.json").read_text())
        layout = about["attributes"]["tierstore"]["optimizers"][0]["layout"]
        (shard,) = [s for s in layout["shards"] if s["name"] == name.removeprefix("module.")]
        place = slice(shard["array_start"], shard["array_start"] + shard["numel"])
        for array, key in (("main", "param"), ("exp_avg", "exp_avg"), ("exp_avg_sq",) * 2):
            path = directory / "kept/rank-00000/gen-a/opt-0" / array
            found = np.asarray(zarr.open_array(path, mode="r")[place])
            check((found == state[key].numpy()).all(), f"{array} of {name}")


def megatrons_own_parser(directory: Path) -> None:
    try:
        from megatron.training.arguments import parse_args
    except ImportError:
        return  # this release does not ship megatron.training
    sys.argv = ["train", "--optimizer-state-tier=nvme", f"--optimizer-state-dir={directory}"]
    sys.argv += ["--use-distributed-optimizer", "--optimizer-state-slots=3"]
    args = parse_args(extra_args_provider=tiers.add_arguments)
    config = tiers.config_from_args(args)
    check(config == TierConfig(tier="nvme", directories=(directory,), slots=3), config)
    args.log_params_norm = args.async_save = True
    said = refusal(lambda: tiers.config_from_args(args), ConfigError)
    check("--log-params-norm" in said and "--async-save" in said, said)


CHECKS = [
    a_second_attach,
    after_the_first_step,
    options_of_the_optimizer,
    a_failed_attach_leaves_everything,
    an_attach_that_fails_late_leaves_everything,
    what_is_left_in_place_of_main_params,
    a_closed_handle,
    a_snapshot_after_training,
    megatrons_own_parser,
]


def main() -> None:
    directory = Path(sys.argv[1])
    failed = {}
    warnings.simplefilter("ignore")
    with megatron_on_cpu.cuda_is_cpu():
        torch.distributed.init_process_group(
            "gloo", init_method=(directory / "rendezvous").as_uri(), rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
        for function in CHECKS:
            place = directory / function.__name__
            place.mkdir()
            try:
                function(place)
            except Exception:
                failed[function.__name__] = traceback.format_exc()
    print(json.dumps(failed))


if __name__ == "__main__":
    main()
