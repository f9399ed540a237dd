"""Tables of plain text, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.measurement import SizeResult
from benchmarks.units import readable_numel, spread
from tierstore.metrics import GIB, readable

__all__ = ["machine_lines", "size_tables", "summary", "table"]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell, aligned to the right; the first one to the left."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join([cells[0].ljust(len(first)), *others]).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([line(headers), rule, *(line(row) for row in rows)])


def summary(result: SizeResult) -> str:
    """One line of what matters most."""
    return (
        f"{spread([repeat.step_s for repeat in result.repeats])} s/step, "
        f"{spread(result.ratios)} of the limit"
    )


def size_tables(results: Sequence[SizeResult]) -> str:
    """How fast, where the time went, and what memory it took: three tables, a row per size."""
    speed = table(
        ["numel", "GiB", "s/step", "GB/s moved", "limit GB/s", "of the limit"],
        [
            [
                readable_numel(result.numel),
                f"{result.state_nbytes / GIB:.2f}",
                spread([repeat.step_s for repeat in result.repeats]),
                spread([repeat.gb_per_s for repeat in result.repeats]),
                spread(result.limits_gb_per_s),
                spread(result.ratios),
            ]
            for result in results
        ],
    )
    time = table(
        [
            *("numel", "stall read s", "update s", "stall write s", "commit s", "host"),
            *("CPU s/step", "allocate s", "fill s"),
        ],
        [
            [
                readable_numel(result.numel),
                *(
                    f"{_typical(result, name):.3f}"
                    for name in ("stall_read_s", "update_s", "stall_write_s", "commit_s")
                ),
                f"{median(repeat.host_share for repeat in result.repeats):.0%}",
                f"{median(repeat.cpu_s for repeat in result.repeats):.2f}",
                f"{result.allocate_s:.2f}",
                f"{result.fill_s:.2f}",
            ]
            for result in results
        ],
    )
    memory = table(
        [
            *("numel", "window", "device held", "+ in a step"),
            *("store's host", "host growth", "page cache"),
        ],
        [
            [
                readable_numel(result.numel),
                readable(result.window_nbytes),
                readable(result.device_held_nbytes),
                readable(max(repeat.device_peak_nbytes for repeat in result.repeats)),
                readable(result.store_host_nbytes),
                readable(result.host_growth_nbytes),
                _signed(sum(repeat.page_cache_nbytes for repeat in result.repeats)),
            ]
            for result in results
        ],
    )
    ways = dict.fromkeys(
        rate.how for result in results for rates in result.limits for rate in rates
    )
    without_overlap = [
        f"{readable_numel(result.numel)} without overlap: "
        f"{spread([read.gb_per_s for read, _ in result.one_way])} GB/s in, "
        f"{spread([written.gb_per_s for _, written in result.one_way])} GB/s out; "
        f"at the limits all takes {spread(result.overlap_gains)} times as long"
        for result in results
        if result.one_way
    ]
    limits = [f"limit: {'; '.join(ways)}", *without_overlap]
    return "\n".join([speed, *limits, "", time, "", memory])


def _typical(result: SizeResult, name: str) -> float:
    return median(float(getattr(repeat.metrics, name)) for repeat in result.repeats)


def _signed(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else ''}{readable(abs(nbytes))}"


def machine_lines(about: Mapping[str, Any]) -> str:
    """What `benchmarks.machine.describe_machine` found, for people."""
    packages = " ".join(f"{name} {version}" for name, version in about["packages"].items())
    size = readable(about["memory_nbytes"])
    lines = [
        f"{about['gpu'] or 'no GPU'}, {about['cores']} cores, {size} of memory",
        f"kernel {about['kernel']}, {about['date']}",
        f"Python {about['python']}, torch {about['torch']}, CUDA {about['cuda']}, {packages}",
    ]
    lines += [
        f"{place['directory']}: {place['file_system']}, {readable(place['free_nbytes'])} free"
        for place in about["directories"]
    ]
    return "\n".join(lines)
