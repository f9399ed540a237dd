"""What a store holds, and whose it is: names of arrays, their layout, a rank, a finished step."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tierstore.errors import LayoutError
from tierstore.zarr_format import ArrayFormat

if TYPE_CHECKING:
    from tierstore.layout import StateLayout

__all__ = ["ArrayKey", "Commit", "Identity", "OptimizerLayout"]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, order=True)
class ArrayKey:
    """Name of one array of a store: ``opt-0`` and ``exp_avg``."""

    optimizer: str
    name: str

    def __str__(self) -> str:
        return f"{self.optimizer}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class OptimizerLayout:
    """The arrays of one optimizer.

    Parameters
    ----------
    name
        ``opt-0``, ``opt-1``, ...: the optimizer's place in the chain.
    layout
        The grid and the shards, shared by all arrays.
    arrays
        Array name to element type (torch's name): ``main`` and one per state tensor.

    Raises
    ------
    LayoutError
        A name that can't be a directory's.
    """

    name: str
    layout: StateLayout
    arrays: Mapping[str, str]

    def __post_init__(self) -> None:
        for name in (self.name, *self.arrays):
            if not _NAME.fullmatch(name):
                raise LayoutError(
                    f"{name!r} can't be the name of an optimizer or array: up to 64 letters, "
                    "digits, '_' and '-' can, since it becomes the name of a directory"
                )

    def keys(self) -> Sequence[ArrayKey]:
        """The arrays in order."""
        return self._keys

    @cached_property
    def _keys(self) -> tuple[ArrayKey, ...]:
        return tuple(ArrayKey(self.name, array) for array in self.arrays)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal layouts and arrays, and for no others."""
        return f"{self.layout.fingerprint()}:{json.dumps(dict(self.arrays), sort_keys=True)}"

    @property
    def nbytes(self) -> int:
        """Bytes of the elements of all arrays."""
        return sum(form.numel * form.type.itemsize for form in self.formats.values())

    @cached_property
    def formats(self) -> Mapping[str, ArrayFormat]:
        """Places and metadata of each array's chunk files."""
        return {
            name: ArrayFormat(
                dtype=dtype,
                numel=self.layout.numel,
                chunk_numel=self.layout.chunk_numel,
                tile_numel=self.layout.tile_numel,
            )
            for name, dtype in self.arrays.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose state this is.

    Parameters
    ----------
    nonce
        Text drawn once per run and equal on all its ranks.
    rank
        Global rank.
    topology
        Sizes and ranks of the parallel groups, for people and for loading elsewhere.
    """

    nonce: str
    rank: int = 0
    topology: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def directory_name(self) -> str:
        """Name of the rank's group in a zarr root."""
        return f"rank-{self.rank:05d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One finished generation.

    Parameters
    ----------
    step
        Optimizer steps that the state has seen.
    state
        Step counters by optimizer, as JSON values.
    job
        What the trainer gave to go with the generation, as JSON values: iteration, schedule, ...
    """

    step: int
    state: Mapping[str, Any]
    job: Mapping[str, Any] = field(default_factory=dict)
