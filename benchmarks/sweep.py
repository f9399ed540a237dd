"""How fast a tier is, beside what the machine can do: ``python -m benchmarks.sweep --help``."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.file_limits import fio_mixed
from benchmarks.limits import Rate
from benchmarks.machine import describe_machine
from benchmarks.measurement import SizeResult, measure_size
from benchmarks.problem import OPTIMIZERS
from benchmarks.report import machine_lines, size_tables, summary
from benchmarks.units import parse_numels, readable_numel
from tierstore.config import RECOVERY_MODES, TierConfig
from tierstore.errors import TierStoreError
from tierstore.layout import DEFAULT_TILE_NUMEL, MAX_CHUNK_NUMEL

__all__ = ["main", "make_parser"]

_FILE_TIERS = ("nvme", "gds")
_OPTIONS = (
    "recovery",
    "tile_numel",
    "chunk_numel",
    "slots",
    "io_threads",
    "no_checksums",
    "one_way",
    "warmup",
    "seed",
)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    parser.add_argument("--tier", required=True, choices=("cpu", *_FILE_TIERS))
    parser.add_argument(
        "--numel",
        required=True,
        type=parse_numels,
        help="parameters, several sizes with commas in between; K, M and G are 10**3, 10**6, 10**9",
    )
    parser.add_argument(
        "--dir",
        default="",
        help="for tiers of files: a directory, or one for each drive with commas in between",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--tile-numel", type=int, default=DEFAULT_TILE_NUMEL)
    parser.add_argument("--chunk-numel", type=int, default=MAX_CHUNK_NUMEL)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--io-threads", type=int, default=4)
    parser.add_argument("--recovery", choices=RECOVERY_MODES, default="step")
    parser.add_argument(
        "--no-checksums",
        action="store_true",
        help="leave the nvme tier's crc32c out, to tell what it costs from what the rest does",
    )
    parser.add_argument(
        "--one-way",
        action="store_true",
        help="measure reading alone and writing alone too: what overlap can gain here at most",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, help="adamw-fused on a GPU, else adamw, if left out"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for every number, raw")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and leave the directory as it was."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.repeats < 1 or args.warmup < 0:
        parser.error("--repeats must be at least 1, --warmup at least 0")
    if args.tier in _FILE_TIERS and not args.dir:
        parser.error(f"the {args.tier} tier needs --dir")
    device = torch.device(args.device)
    optimizer = args.optimizer or ("adamw-fused" if device.type == "cuda" else "adamw")
    directories = args.dir.split(",") if args.tier in _FILE_TIERS else []
    about = describe_machine(directories)
    print(machine_lines(about))
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.sweep", *(arguments or sys.argv[1:])]),
        "machine": about,
        "tier": args.tier,
        "optimizer": optimizer,
        "options": {name: getattr(args, name) for name in _OPTIONS},
        "sizes": [],
        "fio": None,
    }
    results: list[SizeResult] = []
    status = 0
    try:
        config = TierConfig(
            tier=args.tier,
            directories=tuple(Path(directory) for directory in directories),
            chunk_numel=args.chunk_numel,
            tile_numel=args.tile_numel,
            slots=args.slots,
            recovery=args.recovery,
            io_threads=args.io_threads,
            role="benchmark",
        )
        for numel in args.numel:
            with _checksums(kept=not args.no_checksums):
                result = measure_size(
                    numel,
                    config,
                    device=device,
                    optimizer=optimizer,
                    repeats=args.repeats,
                    warmup=args.warmup,
                    seed=args.seed,
                    one_way=args.one_way,
                )
            results.append(result)
            # At once: a long run may be cut off before its last size.
            print(f"measured {readable_numel(numel)}: {summary(result)}", flush=True)
            report["sizes"].append(result.to_json())
            _save(report, args.json)
    except TierStoreError as error:
        print(f"not measured: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("interrupted: what was made for the measurement is removed", file=sys.stderr)
        return 130
    if not results:
        return status
    print(f"\n{args.tier} tier ({results[-1].mode}), {optimizer}, --recovery {args.recovery}")
    print(size_tables(results))
    fio = _fio(Path(directories[0]), args, results[-1]) if directories else None
    if fio is not None:
        print(f"{fio.how}: {fio.gb_per_s:.2f} GB/s")
        report["fio"] = fio.to_json()
        _save(report, args.json)
    return status


@contextlib.contextmanager
def _checksums(*, kept: bool) -> Iterator[None]:
    """Let the nvme tier make and check its checksums, or write zeros and find zeros right."""
    with contextlib.ExitStack() as stack:
        if not kept:
            # A plain function: a mock would keep what it is called with.
            stack.enter_context(mock.patch("tierstore.backends.posix.checksum", _no_checksum))
        yield


def _no_checksum(data: object) -> bytes:
    return bytes(4)


def _save(report: Mapping[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1))


def _fio(directory: Path, args: argparse.Namespace, result: SizeResult) -> Rate | None:
    """Fio's own number for comparison; one that fails costs no results."""
    tile_nbytes = min(args.tile_numel, result.numel) * 4 // 4096 * 4096
    nbytes = 2 * result.state_nbytes
    try:
        return fio_mixed(directory, nbytes, args.io_threads, tile_nbytes)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        print(f"fio failed: {error}", file=sys.stderr)
        return None


if __name__ == "__main__":
    # What ends the program early must not leave gigabytes behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
