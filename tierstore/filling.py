"""Fills a rank's arrays from a store that was saved on any topology, tile by tile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore._saved_counters import group_steps_of, scalars_of
from tierstore.copies import SourceId
from tierstore.errors import LayoutError
from tierstore.layout import Tile
from tierstore.reshard import plan
from tierstore.zarr_format import ARRAY_DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.records import OptimizerLayout
    from tierstore.saved import SavedArray, SavedStore

__all__ = ["Filling", "converted", "fill_from"]


def converted(values: NDArray[Any], dtype: str, wanted: str) -> NDArray[Any]:
    """Elements as those of another type, rounded to nearest even as torch does.

    Parameters
    ----------
    values
        The elements, or their bits where numpy has no such type.
    dtype, wanted
        Keys of `ARRAY_DTYPES`.
    """
    if dtype == wanted:
        return values
    import torch

    # A copy: the tile is read-only, and kept for others.
    found = torch.from_numpy(values.copy()).view(getattr(torch, dtype))
    bits = np.dtype(ARRAY_DTYPES[wanted].zarr)
    return found.to(getattr(torch, wanted)).view(torch.uint8).numpy().view(bits)


def fill_from(
    saved: SavedStore,
    target: OptimizerLayout,
    *,
    rank: int | None = None,
    topology: Mapping[str, int] | None = None,
) -> Filling:
    """Match the arrays of one optimizer of one rank with all that was saved.

    Parameters
    ----------
    saved
        The store. The parameters of `target` may lie in any of its ranks and optimizers.
    target
        What is to be filled.
    rank
        The rank that it belongs to: of several copies that of the same rank is taken.
    topology
        The rank's, as in `Identity`. Parameters that the model does not list can be matched by
        name only, which is safe where the rank's place in the job is the same as in the saved one;
        elsewhere they count as missing. None takes it to be the same.

    Moments of another type are converted; main params are not.

    Raises
    ------
    LayoutError
        Elements or arrays that nobody saved, tensors of another shape, or main params of another
        type.
    """
    return Filling(saved, target, rank, topology)


class Filling:
    """The tiles of one optimizer of one rank, made from a saved store; see `fill_from`.

    To iterate holds in memory the arrays of one tile of the target, which it gives away, and at
    most ``cache_tiles`` tiles of the saved store.

    Attributes
    ----------
    plan
        What is copied from where.
    """

    def __init__(
        self,
        saved: SavedStore,
        target: OptimizerLayout,
        rank: int | None,
        topology: Mapping[str, int] | None,
    ) -> None:
        self._saved = saved
        self._target = target
        self._layouts = {source: entry.layout for source, entry in saved.optimizers().items()}
        same_place = topology is None or (
            rank in saved.ranks and dict(saved.ranks[rank].identity.topology) == dict(topology)
        )
        self._known_scalars: dict[SourceId, list[dict[str, float]]] = {}
        self.plan = plan(target.layout, self._layouts, rank=rank, by_name=same_place)
        self._arrays = {
            (source, name): self._array(source, name)
            for source in self.plan.sources
            for name in target.arrays
        }

    def _array(self, source: SourceId, name: str) -> SavedArray:
        found = self._saved.array(source.rank, source.optimizer, name)
        if name == "main" and found.dtype != self._target.arrays[name]:
            raise LayoutError(
                f"{found} is {found.dtype}, and {self._target.name}/{name} is to be "
                f"{self._target.arrays[name]}: main params are not converted"
            )
        return found

    def tile(self, index: int) -> dict[str, NDArray[Any]]:
        """Tile number `index` of every array, padding zero.

        Raises
        ------
        CorruptError, TransferError, ConfigError
            As `SavedArray.read`.
        """
        grid = self._target.layout.tile(index)
        arrays = {
            name: np.zeros(grid.numel, np.dtype(form.type.zarr).newbyteorder("<"))
            for name, form in self._target.formats.items()
        }
        for read in self.plan.reads(index):
            for name, out in arrays.items():
                array = self._arrays[read.source, name]
                found = converted(array.tile(read.tile), array.dtype, self._target.arrays[name])
                for copy in read.copies:
                    copy.apply(found, out)
        return arrays

    def __iter__(self) -> Iterator[tuple[Tile, dict[str, NDArray[Any]]]]:
        for tile in self._target.layout.tiles():
            yield tile, self.tile(tile.index)

    def scalars(self) -> list[dict[str, float]]:
        """The scalars (a step counter) of each shard of the target, by name.

        Raises
        ------
        LayoutError
            The saved shards that a shard is made from have different ones, or none.
        CorruptError
            A rank's counters are not such.
        """
        covering = self.plan.covering()
        found = []
        for index, shard in enumerate(self._target.layout.shards):
            # A shard without elements is made from nothing; its namesakes have counted its steps.
            shards = covering.get(index) or self._namesakes.get(shard.name, {})
            values = {
                (source, number): self._saved_scalars(source)[number] for source, number in shards
            }
            different = {tuple(sorted(entry.items())): place for place, entry in values.items()}
            if len(different) != 1:
                said = (f"{dict(entry)} on {place[0]}" for entry, place in different.items())
                raise LayoutError(
                    f"{shard.name} was saved with no one set of scalars, but with: "
                    f"{'; '.join(said) or 'none'}"
                )
            found.append(dict(next(iter(different))))
        return found

    def group(self) -> dict[str, int]:
        """What the saved optimizers keep for each group: ``step``, or nothing.

        Raises
        ------
        LayoutError
            Their groups have different steps.
        CorruptError
            A rank's counters are not such.
        """
        steps: dict[int, SourceId] = {}
        for source in self.plan.sources or self._layouts:
            steps |= dict.fromkeys(group_steps_of(self._saved, source), source)
        if len(steps) > 1:
            said = ", ".join(f"{step} on {source}" for step, source in steps.items())
            raise LayoutError(f"the groups of {self._target.name} have different steps: {said}")
        return {"step": next(iter(steps))} if steps else {}

    def counters(self, n_groups: int) -> dict[str, Any]:
        """What `ShardUpdate.restore` takes, for an optimizer of so many groups.

        Raises
        ------
        LayoutError, CorruptError
            As `scalars` and `group`.
        """
        rows = self.scalars()
        names = list(dict.fromkeys(name for row in rows for name in row))
        if any(len(row) != len(names) for row in rows):
            raise LayoutError(f"parameters of {self._target.name} have different scalars: {names}")
        return {
            "groups": [self.group() for _ in range(n_groups)],
            "scalars": {
                name: [[value, len(list(run))] for value, run in groupby(row[name] for row in rows)]
                for name in names
            },
        }

    @cached_property
    def _namesakes(self) -> dict[str, dict[tuple[SourceId, int], None]]:
        found: dict[str, dict[tuple[SourceId, int], None]] = {}
        for source, layout in self._layouts.items():
            for number, shard in enumerate(layout.shards):
                found.setdefault(shard.name, {})[source, number] = None
        return found

    def _saved_scalars(self, source: SourceId) -> list[dict[str, float]]:
        """The scalars of each shard of a source."""
        if source not in self._known_scalars:
            self._known_scalars[source] = scalars_of(self._saved, source)
        return self._known_scalars[source]
