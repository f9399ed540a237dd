"""Other ways of stepping the same optimizer: ``python -m benchmarks.peers --help``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.machine import describe_machine
from benchmarks.peers.peer import PEERS, Outcome, Task
from benchmarks.problem import OPTIMIZERS
from benchmarks.report import machine_lines, table
from benchmarks.units import parse_numel, readable_numel, spread
from tierstore.metrics import readable

__all__ = ["main", "make_parser", "outcomes_table", "run_peer"]

_SAID_LINES = 15


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--numel", type=parse_numel, default="1G", help="parameters, such as 0.25G")
    parser.add_argument("--dir", default=".", help="directory on the drive, for files")
    parser.add_argument(
        "--only",
        type=_names,
        default=list(PEERS),
        help=f"some of {', '.join(PEERS)}, in any order; a name may come twice",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="as for benchmarks.sweep")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one peer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for every number, raw")
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown: {', '.join(unknown)}; known: {', '.join(PEERS)}"
        )
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the peers one after the other, and print what they took."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.repeats < 1 or args.warmup < 0:
        parser.error("--repeats must be at least 1, --warmup at least 0")
    about = describe_machine([args.dir])
    print(machine_lines(about), flush=True)
    scratch = Path(args.dir, f"peers-{secrets.token_hex(4)}")
    default = "adamw-fused" if torch.device(args.device).type == "cuda" else "adamw"
    outcomes: list[Outcome] = []
    for number, name in enumerate(args.only):
        directory = scratch / str(number)
        directory.mkdir(parents=True)
        task = Task(
            numel=args.numel,
            seed=args.seed,
            device=args.device,
            optimizer=args.optimizer or default,
            directory=str(directory),
            repeats=args.repeats,
            warmup=args.warmup,
        )
        try:
            outcome = run_peer(name, task, args.timeout)
        except KeyboardInterrupt:
            print("interrupted: what was made is removed", file=sys.stderr)
            return 130
        finally:
            # Whatever became of the process: its files are gigabytes.
            shutil.rmtree(scratch)
        outcomes.append(outcome)
        print(f"{name}: {outcome.not_run or spread(outcome.step_s)}", flush=True)
        if args.json is not None:
            command = shlex.join(["python", "-m", "benchmarks.peers", *(arguments or sys.argv[1:])])
            report = {
                "command": command,
                "machine": about,
                "numel": args.numel,
                "peers": [dataclasses.asdict(outcome) for outcome in outcomes],
            }
            args.json.write_text(json.dumps(report, indent=1))
    print(f"\n{readable_numel(args.numel)} parameters, {args.repeats} steps each")
    print(outcomes_table(outcomes))
    return 0


def run_peer(name: str, task: Task, timeout_s: float) -> Outcome:
    """Measure a peer in a process of its own.

    Parameters
    ----------
    name
        One of `PEERS`.
    task
        What to measure; its directory exists and is empty.
    timeout_s
        Seconds after which the process is ended.
    """
    result = Path(task.directory).with_suffix(".json")
    command = [sys.executable, "-m", "benchmarks.peers.child", name, str(result)]
    try:
        process = subprocess.run(
            command,
            input=json.dumps(dataclasses.asdict(task)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(name, not_run=f"it took more than {timeout_s:g} s")
    if result.exists():
        outcome = Outcome(**json.loads(result.read_text()))
    else:
        outcome = Outcome(name, not_run=f"its process ended with status {process.returncode}")
    if outcome.not_run:
        print("\n".join(process.stdout.splitlines()[-_SAID_LINES:]), file=sys.stderr)
    return outcome


def outcomes_table(outcomes: Sequence[Outcome]) -> str:
    """A row for each peer, with its time over ours, and the notes underneath."""
    ran = [outcome for outcome in outcomes if not outcome.not_run]
    rows = []
    for outcome in ran:
        beside = PEERS[outcome.name].beside
        ours = [second for other in ran if other.name == beside for second in other.step_s]
        ratio = f"{median(outcome.step_s) / median(ours):.2f}" if ours else "-"
        rows.append(
            [
                outcome.name,
                spread(outcome.step_s),
                ratio,
                f"{outcome.moved_nbytes / 1e9:.2f}",
                readable(outcome.device_nbytes),
                readable(outcome.host_nbytes),
            ]
        )
    headers = ["peer", "s/step", "time / ours", "GB moved", "device memory", "host memory"]
    lines = [table(headers, rows)]
    lines += [
        f"{name}: not run: {why}" for name, why in ((o.name, o.not_run) for o in outcomes) if why
    ]
    notes = {outcome.name: outcome.note for outcome in ran}
    lines += ["", *(f"{name}: {note}" for name, note in notes.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    # What ends the program early must not leave gigabytes behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
