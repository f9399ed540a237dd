"""The demo's judgement of the runs: what is equal, what streamed, and a table of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rich.table import Table

from examples._bits import Tensors, differing, nbytes

Record = Mapping[str, Any]

# Array of the store -> what Megatron calls the same thing.
ARRAYS = {"main": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def milestones(steps: int) -> list[int]:
    """Return the first, each tenth and the last step."""
    return sorted({1, *range(10, steps + 1, 10), steps})


def of_kind(state: Tensors, kind: str) -> dict[str, torch.Tensor]:
    """Return one kind of state (``exp_avg``, ...) of all parameters."""
    return {name: tensor for name, tensor in state.items() if name.rpartition("/")[2] == kind}


def compared(record: Record) -> dict[str, dict[str, torch.Tensor]]:
    """Return what must be equal, by the title of its row."""
    return {
        "all losses": {"losses": torch.tensor(record["losses"], dtype=torch.float64)},
        "weights": record["weights"],
        "main params": of_kind(record["state"], "param"),
        "exp_avg": of_kind(record["state"], "exp_avg"),
        "exp_avg_sq": of_kind(record["state"], "exp_avg_sq"),
        "step": of_kind(record["state"], "step"),
    }


def verdict(untouched: Tensors, tiered: Tensors) -> str:
    """Return the cell of a comparison; nothing compared is no success."""
    if not nbytes(untouched):
        return "[red]nothing[/]"
    names = differing(untouched, tiered)
    return f"[red]{len(names)} DIFFER[/]" if names else "[green]bit-equal[/]"


def table(untouched: Record, tiered: Mapping[str, Record]) -> Table:
    """Return a table with a column a run, the untouched one first."""
    records = [untouched, *tiered.values()]
    steps = len(untouched["losses"])
    grid = Table(
        title=f"{steps} step{'s'[: steps > 1]} without tierstore and with it",
        title_style="bold",
        caption=f"Device memory is {untouched['held_how']}.",
    )
    grid.add_column("", no_wrap=True)
    for name in ("none", *tiered):
        grid.add_column(name, justify="right", no_wrap=True)

    for step in milestones(steps):
        losses = (f"{record['losses'][step - 1]:.6f}" for record in records)
        grid.add_row(f"loss at step {step}", *losses)
    grid.add_section()
    others = [compared(record) for record in tiered.values()]
    for title, expected in compared(untouched).items():
        size = f" ({nbytes(expected) / 2**20:.1f} MiB)" if nbytes(expected) >= 2**20 else ""
        cells = (verdict(expected, other[title]) for other in others)
        grid.add_row(title + size, "[dim]reference[/]", *cells)
    grid.add_section()
    for title, key in (("read from the tier", "read_nbytes"), ("written to it", "written_nbytes")):
        totals = (f"{record[key] / 2**30:.2f} GiB" for record in tiered.values())
        grid.add_row(title, "-", *totals)
    grid.add_row("steps streamed", "-", *(str(r["streamed_steps"]) for r in tiered.values()))
    held = (f"{record['held_nbytes'] / 2**20:.1f} MiB" for record in records)
    grid.add_row("state in device memory", *held)
    grid.add_row("steps/s", *(f"{record['steps_per_s']:.2f}" for record in records))
    return grid


def faults(untouched: Record, tiered: Mapping[str, Record]) -> list[str]:
    """Return every reason to fail the demo, one line each."""
    found = []
    expected = compared(untouched)
    steps = len(untouched["losses"])
    state_nbytes = sum(nbytes(of_kind(untouched["state"], kind)) for kind in ARRAYS.values())
    found += [f"none: no {title} to compare" for title in expected if not nbytes(expected[title])]
    for name, record in tiered.items():
        for title, tensors in compared(record).items():
            if names := differing(expected[title], tensors):
                found.append(f"{name}: {title} differ in {len(names)} tensors, first {names[0]}")
        if record["streamed_steps"] != steps:
            found.append(f"{name}: streamed {record['streamed_steps']} of {steps} steps")
        for key in ("read_nbytes", "written_nbytes"):
            if record[key] < steps * state_nbytes:
                found.append(
                    f"{name}: {key} is {record[key]}, less than {steps} sweeps"
                    f" over {state_nbytes} bytes of state"
                )
        if record["held_nbytes"] >= untouched["held_nbytes"]:
            found.append(f"{name}: the state holds as much device memory as without tierstore")
    return found
