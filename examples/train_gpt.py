"""Train a small byte-level GPT with Megatron-core, its optimizer state on a tier or not.

One process, or several under torchrun (data parallel); on CUDA, or on the CPU with gloo::

    python -m examples.train_gpt
    python -m examples.train_gpt --optimizer-state-tier=nvme --optimizer-state-dir=/scratch/state
    torchrun --nproc-per-node 2 -m examples.train_gpt --optimizer-state-tier=cpu

What tierstore adds to a Megatron program is marked (1) and (2), and (3) goes on after a crash.
Everything else is Megatron.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tierstore.testing import megatron_on_cpu

megatron_on_cpu.install_import_shims()  # before megatron; only for machines without CUDA or triton

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from examples import _record, _text
from tierstore.adapters import megatron as tier


def parse_args() -> argparse.Namespace:
    """Return the command line: a few sizes, and tierstore's own flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--num-attention-heads", type=int, default=6)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument(
        "--micro-batch-size", type=int, default=32, help="sequences a rank and step"
    )
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--dump", type=Path, metavar="FILE", help="record the run, a file a rank")
    parser.add_argument("--log-level", default="info", help="of tierstore: info is a line a step")
    tier.add_arguments(parser)  # (1) the flags: --optimizer-state-tier and what belongs to it
    return parser.parse_args()


def initialize(seed: int) -> torch.device:
    """Set up torch.distributed (torchrun's environment, or one process) and Megatron."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    # Without CUDA there is no CUDA generator to fork; the inference tracker does not try to.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=not cuda)
    return torch.device("cuda" if cuda else "cpu")


def build_model(args: argparse.Namespace, device: torch.device) -> DistributedDataParallel:
    """Return a bf16 GPT with fp32 gradients, sharded for the distributed optimizer."""
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,  # the same weights on every device
        deterministic_mode=True,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=_text.VOCABULARY,
        max_sequence_length=args.seq_length,
    )
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        Float16Module(config, gpt.to(device)),
    )


def build_optimizer(args: argparse.Namespace, model: DistributedDataParallel) -> MegatronOptimizer:
    """Return Adam as Megatron builds it."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.lr / 10,
        weight_decay=0.1,
        bf16=True,
        use_distributed_optimizer=True,
        clip_grad=args.clip_grad,
    )
    return get_megatron_optimizer(config, [model])


def build_scheduler(args: argparse.Namespace, opt: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return a cosine schedule with warmup."""
    return OptimizerParamScheduler(
        opt,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.lr / 10,
        lr_warmup_steps=args.steps // 10,
        lr_decay_steps=args.steps,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=args.steps,
        wd_incr_style="constant",
    )


def train(args: argparse.Namespace) -> None:
    """Train, and record the run where asked to."""
    device = initialize(args.seed)
    rank = dist.get_rank()
    text = _text.Batches(
        args.seq_length, args.micro_batch_size, seed=args.seed, rank=rank, device=device
    )
    model = build_model(args, device)
    memory = _record.DeviceMemory(device)
    with memory.measured():
        optimizer = build_optimizer(args, model)
        config = tier.config_from_args(args)
        handle = tier.attach(optimizer, config) if config else None  # (2) before the first step
    scheduler = build_scheduler(args, optimizer)
    first_step = 1
    if handle and handle.resumed_step is not None:  # (3) only with --optimizer-state-resume
        first_step = handle.job_state["iteration"] + 1
        scheduler.load_state_dict(handle.job_state["scheduler"])
        scheduler.step(increment=1)

    losses: list[float] = []
    started_s = time.perf_counter()
    for step in range(first_step, args.steps + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        tokens, labels, positions = text.batch(step)
        loss = model(tokens, positions, attention_mask=None, labels=labels).mean()
        loss.backward()
        finalize_model_grads([model])
        if handle:  # what a later run needs to go on from this step
            handle.job_state = {"iteration": step, "scheduler": scheduler.state_dict()}
        with memory.measured():
            _, grad_norm, _ = optimizer.step()

        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        losses.append(mean_loss.item() / dist.get_world_size())
        if rank == 0:
            print(
                f"step {step}/{args.steps} loss {losses[-1]:.4f} grad-norm {grad_norm:.3f}"
                f" lr {optimizer.param_groups[0]['lr']:.2e}",
                flush=True,
            )
        scheduler.step(increment=1)
        if step == first_step < args.steps:
            started_s = time.perf_counter()  # the first step also pays for warming up
    steps_per_s = max(args.steps - first_step, 0) / (time.perf_counter() - started_s)

    record = _record.take(
        model, optimizer, handle, losses=losses, memory=memory, steps_per_s=steps_per_s
    )
    print(f"rank {rank} {_record.summary(record)}", flush=True)
    if args.dump:
        torch.save(record, _record.path_of_rank(args.dump, rank))
    if handle:
        handle.close()


def main() -> None:
    """Run from the command line."""
    args = parse_args()
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("tierstore").setLevel(args.log_level.upper())
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it
    with megatron_on_cpu.cuda_is_cpu():
        train(args)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
