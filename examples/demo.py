"""Train one small GPT untouched and on each tier, and compare the results bit by bit.

::

    python -m examples.demo [--steps 50] [--tiers nvme,cpu] [--keep]

Everything is written below ``.demo/`` of the working directory. The exit code is 0 only if every
tiered run ended in the bits of the untouched run and streamed its state in every step.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import zarr
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples import _report, _zarr_view

UNTOUCHED = "none"
FILE_TIERS = ("nvme", "gds")
TIERS = (*FILE_TIERS, "cpu")
MARKER = ".made-by-the-tierstore-demo"
# Far below the defaults: a model that two cores can train should still have many tiles and chunks.
TILE_NUMEL = 128 * 1024
CHUNK_NUMEL = 2 * 1024 * 1024
REPOSITORY = Path(__file__).resolve().parents[1]


class DemoError(Exception):
    """A reason to stop that needs no traceback."""


def parse_args() -> argparse.Namespace:
    """Return the checked command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=50, help="training steps of each run (50)")
    parser.add_argument(
        "--tiers", default="nvme,cpu", help=f"what to compare, of {','.join(TIERS)} (nvme,cpu)"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the records of the runs too (a failure does)"
    )
    args = parser.parse_args()
    args.tiers = list(dict.fromkeys(args.tiers.split(",")))
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    if unknown := [tier for tier in args.tiers if tier not in TIERS]:
        parser.error(f"--tiers: {unknown[0]!r} is not one of {', '.join(TIERS)}")
    return args


def fresh_directory(path: Path) -> Path:
    """Make `path` anew; what is there already goes only if this program made it."""
    if path.is_symlink() or (path.exists() and not (path / MARKER).is_file()):
        raise DemoError(f"{path} was not made by this demo and stays: move it, or start elsewhere")
    if path.exists():
        shutil.rmtree(path)
    path.mkdir()
    (path / MARKER).write_text("Made by `python -m examples.demo`, which also removes it.\n")
    return path


def command(tier: str, steps: int, directory: Path) -> list[str]:
    """Return the command line of one run: tierstore is a matter of flags."""
    words = [sys.executable, "-m", "examples.train_gpt", f"--steps={steps}"]
    words += [f"--dump={directory / f'{tier}.pt'}", f"--optimizer-state-tier={tier}"]
    if tier != UNTOUCHED:
        words += [f"--optimizer-state-tile-numel={TILE_NUMEL}"]
        words += [f"--optimizer-state-chunk-numel={CHUNK_NUMEL}"]
    if tier in FILE_TIERS:
        words += [f"--optimizer-state-dir={directory / f'{tier}-store'}"]
    return words


def run(tier: str, steps: int, directory: Path, console: Console) -> dict[str, Any]:
    """Train once in a process of its own and return what `train_gpt --dump` recorded."""
    log = directory / f"{tier}.log"
    progress = Progress(
        TextColumn(f"{tier:<5}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    started_s = time.monotonic()
    with (
        log.open("w") as stderr,
        progress,
        subprocess.Popen(
            command(tier, steps, directory),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=REPOSITORY,
        ) as child,
    ):
        bar = progress.add_task(tier, total=steps, loss="starting")
        try:
            for line in child.stdout or ():
                if found := re.match(r"step (\d+)/\d+ loss (\S+)", line):
                    step, loss = int(found[1]), found[2]
                    progress.update(bar, completed=step, loss=f"loss {loss}")
                    if not console.is_terminal and step in _report.milestones(steps):
                        elapsed_s = time.monotonic() - started_s
                        console.print(f"{tier:<5} {step:>3}/{steps} loss {loss} {elapsed_s:5.1f} s")
        except BaseException:
            child.kill()  # an interrupt must not leave a training run behind
            raise
    if child.returncode:
        tail = "\n".join(log.read_text().splitlines()[-20:])
        raise DemoError(
            f"the run with tier {tier} failed ({child.returncode}); {log} ends:\n{tail}"
        )
    record: dict[str, Any] = torch.load(directory / f"{tier}.rank-00000.pt", weights_only=True)
    return record


def show_store(store: Path, untouched: dict[str, Any], console: Console) -> list[str]:
    """Print what plain zarr sees in `store`; return what does not fit the untouched run."""
    console.print(f"[bold]{os.path.relpath(store)}[/] in plain zarr {zarr.__version__}:")
    console.print(_zarr_view.tree(store))
    console.print("One tile at a time, of the generation that [bold]current[/] names:")
    faults = []
    for array_name, kind in _report.ARRAYS.items():
        array = _zarr_view.current_array(store, array_name)
        stored = _zarr_view.l2_norm(_zarr_view.tiles(array))
        shards = _report.of_kind(untouched["state"], kind).values()
        expected = _zarr_view.l2_norm(shard.double().numpy() for shard in shards)
        console.print(f"  {array_name:<10} norm {stored:.9e}   untouched run {expected:.9e}")
        if not math.isclose(stored, expected, rel_tol=1e-12):
            faults.append(
                f"{store.name}: zarr reads another {array_name} than the untouched run has"
            )
    return faults


def demo(args: argparse.Namespace, console: Console) -> list[str]:
    """Run and print everything; return what is wrong, one line each."""
    started_s = time.monotonic()
    directory = fresh_directory(Path.cwd() / ".demo")
    console.print(
        f"A small GPT, {args.steps} steps of Megatron's DistributedOptimizer: untouched (none),"
        f"\nthen with its state on each tier ({', '.join(args.tiers)})."
    )
    untouched = run(UNTOUCHED, args.steps, directory, console)
    tiered = {tier: run(tier, args.steps, directory, console) for tier in args.tiers}
    console.print()
    console.print(_report.table(untouched, tiered))
    faults = _report.faults(untouched, tiered)
    for tier in tiered:
        if tier in FILE_TIERS:
            console.print()
            faults += show_store(Path(tiered[tier]["store"]), untouched, console)
    if not args.keep and not faults:
        for record in directory.glob("*.pt"):
            record.unlink()
    elapsed_s = time.monotonic() - started_s
    console.print(f"\n{elapsed_s:.0f} s in all. Left in .demo/: store, and logs with a line a step")
    return faults


def main() -> int:
    """Return the exit code: 0 if all is equal and streamed, 1 if not."""
    args = parse_args()
    console = Console(highlight=False)
    try:
        faults = demo(args, console)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    for fault in faults:
        console.print(f"[bold red]FAILED[/] {fault}", soft_wrap=True)
    if not faults:
        console.print("[bold green]OK[/] every tier: equal to the bit, and streamed in every step")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
