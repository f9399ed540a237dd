"""One rank of a group of processes that runs case after case; the parent is `megatron_harness`.

Requests come as JSON lines on standard input, answers go as JSON lines to the descriptor that was
standard output. Whatever else is printed ends in the log of the rank.
"""

from __future__ import annotations

import argparse
import datetime as dt
import faulthandler
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron_cases import Build, Case

from tierstore.testing import fused_adam, megatron_on_cpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    parser.add_argument("--build", type=json.loads, required=True)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()  # SIGABRT, which the parent sends to a rank that hangs, prints all stacks
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    build = Build(**options.build)
    torch.set_num_threads(1)
    if build.device == "cpu":
        megatron_on_cpu.install_import_shims()
    if build.flavour == "fused":
        fused_adam.install_as_apex()
    with megatron_on_cpu.cuda_is_cpu() if build.device == "cpu" else nullcontext():
        torch.distributed.init_process_group(
            "gloo" if build.device == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=options.rendezvous.as_uri(),
            rank=options.rank,
            world_size=options.world_size,
            timeout=dt.timedelta(seconds=120),
        )
        _serve(build, answers.write)
    torch.distributed.destroy_process_group()


def _serve(build: Build, answer: Callable[[str], Any]) -> None:
    import megatron_comparison  # imports Megatron, so after the shims

    device = torch.device(build.device)
    if build.device == "cuda":
        torch.use_deterministic_algorithms(True)
    answer(json.dumps({"status": "ready"}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        case = Case.from_json(request["case"])
        print(f"--- {case.name}", file=sys.stderr, flush=True)
        try:
            result = megatron_comparison.run(case, device, Path(request["directory"]))
            reply = {"status": "done"} | result
        except BaseException:
            reply = {"status": "failed", "traceback": traceback.format_exc()}
        answer(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
