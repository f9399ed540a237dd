"""One peer in a process of its own, so that what crashes or is missing costs the others nothing.

``python -m benchmarks.peers.child NAME RESULT-FILE`` with a `Task` as JSON on stdin.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.peers.peer import Open, Outcome, Task, opener
from benchmarks.problem import Problem, make_problem
from tierstore.device import open_device

__all__ = ["main", "measure"]


def measure(name: str, task: Task) -> Outcome:
    """Step a peer and time it; an error becomes the reason why it did not run."""
    try:
        open_peer = opener(name)
        device = torch.device(task.device)
        return _measured(name, task, open_peer, make_problem(task.numel, device, task.seed))
    except Exception as error:
        # The whole story for who reads along; a line of it for the table.
        traceback.print_exc()
        told = str(error).strip().splitlines()
        return Outcome(name, not_run=": ".join([type(error).__name__, *told[:1]]))


def _measured(name: str, task: Task, open_peer: Open, problem: Problem) -> Outcome:
    device = open_device(problem.weight.device)
    cuda = device.torch_device.type == "cuda"
    device.synchronize()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device.torch_device)
    device_before_nbytes = torch.cuda.memory_allocated(device.torch_device) if cuda else 0
    machine.reset_peak_memory()
    host_before_nbytes = machine.peak_memory_nbytes()
    step_s = []
    with open_peer(problem, task) as peer:
        for number in range(task.warmup + task.repeats):
            peer.prepare()
            device.synchronize()
            started = time.perf_counter()
            peer.step()
            device.synchronize()
            if number >= task.warmup:
                step_s.append(time.perf_counter() - started)
        device_peak_nbytes = torch.cuda.max_memory_allocated(device.torch_device) if cuda else 0
        return Outcome(
            name,
            step_s=tuple(step_s),
            device_nbytes=max(device_peak_nbytes - device_before_nbytes, 0),
            host_nbytes=machine.peak_memory_nbytes() - host_before_nbytes,
            moved_nbytes=peer.moved_nbytes,
            note=peer.note,
            findings=peer.findings(),
        )


def main() -> int:
    """Measure the peer that the command line names."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    name, path = sys.argv[1:]
    outcome = measure(name, Task(**json.load(sys.stdin)))
    Path(path).write_text(json.dumps(dataclasses.asdict(outcome)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
