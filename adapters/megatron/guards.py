"""Refuses options that would read or write optimizer state behind the tier's back.

Which ones is the table's business, see `tierstore.adapters.megatron.options`. All that are found
are refused at once, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tierstore.adapters.megatron.options import OPTIONS
from tierstore.errors import ConfigError

__all__ = ["refuse_arguments", "refuse_optimizers"]


def _offending(options: Any, places: Iterable[str]) -> Iterator[str]:
    """Lines for what is refused and found in an object that has options as attributes."""
    wanted = set(places)
    for option in OPTIONS:
        if not option.works and option.on in wanted and option.found(options):
            yield option.line


def _raise_if_any(found: list[str]) -> None:
    if found:
        listed = "\n".join(f"  - {line}" for line in dict.fromkeys(found))
        raise ConfigError(
            "--optimizer-state-tier can't be used as things are. Change each of these, or use "
            f"--optimizer-state-tier=none:\n{listed}"
        )


def refuse_arguments(args: Any) -> None:
    """Refuse what Megatron's training arguments say.

    Raises
    ------
    ConfigError
        Names every offending option and the reason for each.
    """
    _raise_if_any(list(_offending(args, ("arguments", "optimizer", "ddp", "model"))))


def refuse_optimizers(optimizers: Iterable[Any]) -> None:
    """Refuse what the optimizers of a chain say about themselves.

    Raises
    ------
    ConfigError
        Names every offending option and the reason for each.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    found: list[str] = []
    for optimizer in optimizers:
        if not isinstance(optimizer, DistributedOptimizer):
            found.append(
                f"{type(optimizer).__name__}: only DistributedOptimizer is supported "
                "(--use-distributed-optimizer)"
            )
            continue
        if getattr(optimizer, "tierstore_handle", None) is not None:
            found.append("attach: this optimizer's state is on a tier already")
            continue
        found += _offending(optimizer.config, ["optimizer"])
        found += _offending(optimizer.ddp_config, ["ddp"])
        for chunk in optimizer.model_chunks:
            found += _offending(getattr(chunk, "config", None), ["model"])
            for parameter in chunk.parameters():
                found += _offending(parameter, ["parameter"])
        if optimizer.optimizer is not None and len(optimizer.optimizer.state):
            found.append(
                "attach after the first step: the optimizer holds state already; attach right "
                "after get_megatron_optimizer"
            )
    _raise_if_any(found)
