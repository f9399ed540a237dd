"""The command-line flags, for Megatron's own hook for extra arguments."""

from __future__ import annotations

import argparse
import logging
import re
from pathlib import Path
from typing import Any

from tierstore.adapters.megatron.guards import refuse_arguments
from tierstore.config import GDS_MODES, RECOVERY_MODES, RESUME_MODES, TierConfig
from tierstore.errors import ConfigError
from tierstore.layout import DEFAULT_TILE_NUMEL, MAX_CHUNK_NUMEL
from tierstore.registry import available_tiers

__all__ = ["add_arguments", "config_from_args", "parse_directories", "parse_nbytes"]

_FILE_TIERS = ("nvme", "gds")
_logger = logging.getLogger("tierstore.megatron")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add tierstore's flags; give this to Megatron as ``extra_args_provider``."""
    group = parser.add_argument_group(
        "tierstore", "keep the optimizer state off the GPU and stream it through the step"
    )
    group.add_argument(
        "--optimizer-state-tier",
        choices=list(dict.fromkeys(["none", *_FILE_TIERS, "cpu", *sorted(available_tiers())])),
        default="none",
        help="where the state lives: files through direct I/O (nvme), files through GPUDirect "
        "Storage (gds), page-locked host memory (cpu); none leaves Megatron as it is",
    )
    group.add_argument(
        "--optimizer-state-dir",
        type=parse_directories,
        default=(),
        metavar="DIR[,DIR...]",
        help="directory on a local drive for the file tiers, or one for each drive: the state is "
        "spread over them by the bandwidth that each shows. Each run makes a directory of its own "
        "in them, <role>-<nonce>, and leaves it there: remove those of runs that have ended",
    )
    group.add_argument(
        "--optimizer-state-chunk-numel",
        type=int,
        default=MAX_CHUNK_NUMEL,
        metavar="N",
        help="most elements of one file (default and maximum: %(default)s)",
    )
    group.add_argument(
        "--optimizer-state-tile-numel",
        type=int,
        default=DEFAULT_TILE_NUMEL,
        metavar="N",
        help="elements in flight at once, a multiple of 1024 (default: %(default)s)",
    )
    group.add_argument(
        "--optimizer-state-slots",
        type=int,
        default=4,
        metavar="K",
        help="tiles in device memory at once; it holds K x tile x 12 bytes (default: %(default)s)",
    )
    group.add_argument(
        "--optimizer-state-host-memory",
        type=parse_nbytes,
        default=None,
        metavar="SIZE",
        help="cap on the page-locked memory of a rank, such as 512MiB (default: what K tiles in "
        "and K tiles out need; on the cpu tier, the state)",
    )
    group.add_argument(
        "--optimizer-state-recovery",
        choices=RECOVERY_MODES,
        default="step",
        help="step: a crash at any point leaves the last step whole, for twice the space; none: "
        "overwrite in place (default: %(default)s)",
    )
    group.add_argument(
        "--optimizer-state-resume",
        choices=RESUME_MODES,
        default="never",
        help="an earlier run's live state in the same directory: never take it up; auto: where all "
        "ranks hold a common step of one run with the same layout; require: or refuse to start "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--optimizer-state-io-threads",
        type=int,
        default=4,
        metavar="N",
        help="threads that read and, apart from them, threads that write, for each directory "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--optimizer-state-gds",
        choices=GDS_MODES,
        default="auto",
        help="auto: where GPUDirect Storage can't be had, the gds tier runs in kvikio's "
        "compatibility mode and says so; require: refuse to start (default: %(default)s)",
    )
    group.add_argument(
        "--optimizer-state-role",
        default="train",
        metavar="NAME",
        help="first part of the names of this run's directories (default: %(default)s)",
    )
    return parser


def parse_directories(text: str) -> tuple[Path, ...]:
    """Read paths with commas between them.

    Raises
    ------
    argparse.ArgumentTypeError
        There is nothing before, after or between commas.

    Examples
    --------
    >>> [str(path) for path in parse_directories("/nvme0/state,/nvme1/state")]
    ['/nvme0/state', '/nvme1/state']
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} has an empty part; write one directory, or several with a comma between them"
        )
    return tuple(Path(part) for part in parts)


def parse_nbytes(text: str) -> int:
    """Read a size such as ``512MiB``, ``2G`` or ``1073741824``; units are powers of 1024.

    Raises
    ------
    argparse.ArgumentTypeError
        It is not one.

    Examples
    --------
    >>> parse_nbytes("512MiB")
    536870912
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:iB|B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def config_from_args(args: argparse.Namespace | Any) -> TierConfig | None:
    """The configuration that the flags say, or None for ``--optimizer-state-tier=none``.

    Raises
    ------
    ConfigError
        A value is out of range, a flag that is needed is missing, or another of Megatron's
        options does not go with tiered state; the message names all of them.
    """
    if args.optimizer_state_tier == "none":
        if args.optimizer_state_dir:
            _logger.warning(
                "--optimizer-state-dir is given and --optimizer-state-tier is none: the optimizer "
                "state stays where it is"
            )
        return None
    if args.optimizer_state_tier not in available_tiers():
        raise ConfigError(
            f"the {args.optimizer_state_tier} tier is not in this installation of tierstore; it "
            f"has {', '.join(sorted(available_tiers()))}"
        )
    if args.optimizer_state_tier in _FILE_TIERS and not args.optimizer_state_dir:
        raise ConfigError(
            f"--optimizer-state-tier={args.optimizer_state_tier} needs --optimizer-state-dir, a "
            "directory on a local drive"
        )
    refuse_arguments(args)
    return TierConfig(
        tier=args.optimizer_state_tier,
        directories=args.optimizer_state_dir,
        chunk_numel=args.optimizer_state_chunk_numel,
        tile_numel=args.optimizer_state_tile_numel,
        slots=args.optimizer_state_slots,
        host_memory_nbytes=args.optimizer_state_host_memory,
        recovery=args.optimizer_state_recovery,
        resume=args.optimizer_state_resume,
        io_threads=args.optimizer_state_io_threads,
        gds=args.optimizer_state_gds,
        role=args.optimizer_state_role,
    )
