"""Optimizer state at rest by the names of parameters, read lazily and put together over ranks.

``open`` takes a store, a snapshot or a checkpoint, on any file system and saved on any topology;
numpy is all that it needs::

    state = tierstore.inspection.open("/scratch/train-1f2e3d4c")
    state["decoder.final_layernorm.weight"].exp_avg_sq[:10]

Only the tiles that hold those ten elements are read, and checked against their crc32c.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore._indexing import block_of, strides_of
from tierstore._saved_counters import group_steps_of, scalars_of
from tierstore.coordinates import Region, boxes_between
from tierstore.copies import SourceId
from tierstore.errors import BackendUnavailableError, LayoutError
from tierstore.reshard import Held, Holders, array_regions
from tierstore.saved import DEFAULT_CACHE_TILES, SavedArray, SavedStore
from tierstore.zarr_format import ARRAY_DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.layout import Shard

__all__ = ["Holder", "Parameter", "ParameterArray", "SavedState", "open"]


def open(  # noqa: A001 - the name that zarr and every reader of files has for it
    location: str | os.PathLike[str],
    *,
    directories: Sequence[str | os.PathLike[str]] = (),
    frozen: str | None = None,
    cache_tiles: int = DEFAULT_CACHE_TILES,
    storage_options: Mapping[str, Any] | None = None,
) -> SavedState:
    """Open state at rest, read-only.

    The store of a running job can be read as well, as long as the job does not take two further
    steps meanwhile: what it overwrites is found by its checksums, or not found at all. Hold such a
    step by ``freeze`` to be sure.

    Parameters
    ----------
    location, directories, frozen, cache_tiles, storage_options
        See `SavedStore`.

    Raises
    ------
    ConfigError, BackendUnavailableError, CorruptError, LayoutError, TransferError
        As `SavedStore`; or pieces of parameters that can't be right.
    """
    return SavedState(
        SavedStore(
            location,
            directories=directories,
            frozen=frozen,
            cache_tiles=cache_tiles,
            storage_options=storage_options,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A block of a parameter that one rank holds.

    Parameters
    ----------
    rank, optimizer, shard
        Where: the rank, its optimizer and the name of the shard there.
    offset, shape
        Where the block lies in the global tensor.
    array_start
        First element of the block in the rank's arrays.
    """

    rank: int
    optimizer: str
    shard: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    array_start: int


class SavedState(Mapping[str, "Parameter"]):
    """All parameters of a store by their global names. Use it from one thread.

    A parameter that the model's ``sharded_state_dict`` does not list has no global name or shape:
    what each rank holds of it is a flat parameter of its own, ``rank-00003/opt-0/<name>``.

    Parameters
    ----------
    store
        What is read.

    Attributes
    ----------
    store
        The store, with its ranks and their layouts.
    step
        The optimizer step that it holds.

    Raises
    ------
    LayoutError
        Pieces of parameters that can't be right, or that differ in shape between ranks.
    """

    def __init__(self, store: SavedStore) -> None:
        self.store = store
        self.step = store.step
        self._scalars: dict[SourceId, list[dict[str, float]]] = {}
        self._arrays: dict[tuple[SourceId, str], SavedArray] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        holders: defaultdict[str, Holders] = defaultdict(Holders)
        for source, entry in store.optimizers().items():
            for number, shard in enumerate(entry.layout.shards):
                for shape, region in _parts(source, shard):
                    if shapes.setdefault(region.key, shape) != shape:
                        raise LayoutError(
                            f"{region.key} is {shape} in {source} of {store}, and "
                            f"{shapes[region.key]} in another one"
                        )
                    held = Held(source, number, shard.name, region)
                    holders[region.key].entries.append(held)
        self._parameters = {
            name: Parameter(self, name, shapes[name], holders[name]) for name in sorted(holders)
        }

    def __str__(self) -> str:
        return str(self.store)

    def __getitem__(self, name: str) -> Parameter:
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def _array(self, source: SourceId, name: str) -> SavedArray:
        if (source, name) not in self._arrays:
            found = self.store.array(source.rank, source.optimizer, name)
            self._arrays[source, name] = found
        return self._arrays[source, name]

    def _scalars_of(self, source: SourceId) -> list[dict[str, float]]:
        if source not in self._scalars:
            self._scalars[source] = scalars_of(self.store, source)
        return self._scalars[source]


class Parameter:
    """One parameter; get it from a `SavedState`.

    Attributes
    ----------
    name
        Its global name.
    global_shape
        Its shape in the whole model.
    """

    def __init__(
        self, state: SavedState, name: str, global_shape: tuple[int, ...], holders: Holders
    ) -> None:
        self.name = name
        self.global_shape = global_shape
        self._state = state
        self._holders = holders

    def __repr__(self) -> str:
        return f"<{self.name} {self.global_shape} of {self._state}>"

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.global_shape)

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Which ranks hold which blocks; replicas are all listed."""
        return tuple(
            Holder(
                rank=held.source.rank,
                optimizer=held.source.optimizer,
                shard=held.name,
                offset=held.region.offset,
                shape=held.region.shape,
                array_start=held.region.start,
            )
            for held in self._holders.entries
        )

    @cached_property
    def missing_numel(self) -> int:
        """Elements that no rank holds."""
        wanted = _box(self.name, (0,) * len(self.global_shape), self.global_shape)
        copies = self._holders.copies(0, self.name, wanted, None)
        return self.numel - sum(copy.numel for copy in copies)

    @cached_property
    def arrays(self) -> Mapping[str, ParameterArray]:
        """Every state array by its name."""
        names: dict[str, dict[str, None]] = {}
        optimizers = self._state.store.optimizers()
        for held in self._holders.entries:
            for name, dtype in optimizers[held.source].arrays.items():
                names.setdefault(name, {})[dtype] = None
        found = {}
        for name, dtypes in names.items():
            if len(dtypes) > 1:
                raise LayoutError(f"{self.name} has a {name} of types {', '.join(dtypes)}")
            found[name] = ParameterArray(self, name, next(iter(dtypes)))
        return found

    def _named(self, name: str) -> ParameterArray:
        try:
            return self.arrays[name]
        except KeyError:
            raise LayoutError(
                f"{self.name} has no {name}; it has {', '.join(self.arrays)}"
            ) from None

    @property
    def main(self) -> ParameterArray:
        """The fp32 main param."""
        return self._named("main")

    @property
    def exp_avg(self) -> ParameterArray:
        """The first moment."""
        return self._named("exp_avg")

    @property
    def exp_avg_sq(self) -> ParameterArray:
        """The second moment."""
        return self._named("exp_avg_sq")

    @cached_property
    def step(self) -> float | None:
        """The optimizer's own counter of steps for this parameter; None if it keeps none.

        Raises
        ------
        LayoutError
            The ranks that hold the parameter have counted different steps.
        CorruptError
            A rank's counters are not such.
        """
        found: dict[float, SourceId] = {}
        for held in self._holders.entries:
            scalars = self._state._scalars_of(held.source)[held.number]
            # Where the state of a parameter does not count, its group may.
            steps = (
                [scalars["step"]]
                if "step" in scalars
                else group_steps_of(self._state.store, held.source)
            )
            found |= dict.fromkeys(steps, held.source)
        if len(found) > 1:
            said = ", ".join(f"{step:g} on {source}" for step, source in found.items())
            raise LayoutError(f"{self.name} has no one step: {said}")
        return next(iter(found), None)


class ParameterArray:
    """One state array of one parameter; slices of it are read when they are asked for.

    It takes integers, slices and ``...``, as numpy does; ``np.asarray`` reads all of it. A slice
    with a step reads the block from its first to its last element.

    Attributes
    ----------
    parameter, name
        Whose it is, and its name.
    torch_dtype
        Its type by torch's name.
    shape
        The parameter's global shape.
    """

    def __init__(self, parameter: Parameter, name: str, torch_dtype: str) -> None:
        self.parameter = parameter
        self.name = name
        self.torch_dtype = torch_dtype
        self.shape = parameter.global_shape

    def __repr__(self) -> str:
        return f"<{self.name} of {self.parameter.name} {self.shape} {self.torch_dtype}>"

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The numpy type; of bfloat16 and fp8 that of ``ml_dtypes``.

        Raises
        ------
        BackendUnavailableError
            ``ml_dtypes`` is needed and not installed.
        """
        bits = self._bits
        if bits.kind == "f":
            return bits
        try:
            import ml_dtypes
        except ImportError as error:
            raise BackendUnavailableError(
                f"{self} has elements that numpy does not know; pip install ml_dtypes"
            ) from error
        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.torch_dtype))
        return found

    @property
    def _bits(self) -> np.dtype[Any]:
        return np.dtype(ARRAY_DTYPES[self.torch_dtype].zarr).newbyteorder("<")

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self._bits.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self} has no axis")
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self} lies in files: there is no array of it without a copy")
        found = self.flat(0, self.size).reshape(self.shape)
        return found if dtype is None else found.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> Any:
        offset, shape, then = block_of(index, self.shape)
        return self._read(offset, shape)[then]

    def flat(self, start: int, stop: int) -> NDArray[Any]:
        """Elements ``[start, stop)`` of the flattened array; only their tiles are read.

        Raises
        ------
        LayoutError
            No rank holds some of them, or there are no such elements.
        CorruptError, TransferError, ConfigError
            As `SavedArray.read`.
        """
        if not 0 <= start <= stop <= self.size:
            raise LayoutError(f"elements {start} to {stop} of {self}, which has {self.size}")
        if start == stop:
            return np.empty(0, self.dtype)
        boxes = boxes_between(self.shape, strides_of(self.shape), start, stop)
        parts = [self._read(offset, shape).reshape(-1) for offset, shape in boxes]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def blocks(self, numel: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """All elements in order, flattened, at most `numel` at once, and where each part starts.

        Raises
        ------
        LayoutError, CorruptError, TransferError, ConfigError
            As `flat`.
        """
        for start in range(0, self.size, numel):
            yield start, self.flat(start, min(start + numel, self.size))

    def _read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        """A block of the global tensor."""
        state, holders = self.parameter._state, self.parameter._holders
        out = np.empty(prod(shape), self._bits)
        lacking = out.size
        copies = holders.copies(0, "", _box(self.parameter.name, offset, shape), None)
        for copy in copies if lacking else ():
            array = state._array(copy.source, self.name)
            grid = array.layout.tile_numel
            for tile in range(copy.source_start // grid, (copy.source_stop - 1) // grid + 1):
                for part in copy.of_source(tile * grid, (tile + 1) * grid):
                    part.moved(tile * grid, 0).apply(array.tile(tile), out)
            lacking -= copy.numel
        if lacking:
            raise LayoutError(
                f"{state}: no rank holds {lacking:,} of the {out.size:,} elements of "
                f"{self.parameter.name} at {offset}. Put the groups of all ranks into one root"
            )
        return out.view(self.dtype).reshape(shape)


def _parts(source: SourceId, shard: Shard) -> Iterator[tuple[tuple[int, ...], Region]]:
    """Global shape and region of all that a shard holds."""
    if shard.pieces:
        shapes = {piece.key: piece.global_shape for piece in shard.pieces}
        for region in array_regions(shard):
            yield shapes[region.key], region
    elif shard.numel:
        name = f"rank-{source.rank:05d}/{source.optimizer}/{shard.name}"
        shape = (shard.numel,)
        yield (
            shape,
            Region(key=name, offset=(0,), shape=shape, start=shard.array_start, strides=(1,)),
        )


def _box(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Region:
    return Region(key=name, offset=offset, shape=shape, start=0, strides=strides_of(shape))
