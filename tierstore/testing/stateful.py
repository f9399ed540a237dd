"""A model of what a store must do, driven by hypothesis against a plain dictionary."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierstore.config import TierConfig
from tierstore.device import open_device
from tierstore.errors import StateError
from tierstore.records import ArrayKey, Identity
from tierstore.store import TierStore
from tierstore.testing.conformance import make_optimizer, read_array, tile_values
from tierstore.zarr_format import CHECKSUM_NBYTES, checksum

if TYPE_CHECKING:
    import torch

__all__ = ["store_machine"]


def store_machine(store_class: type[TierStore]) -> type[RuleBasedStateMachine]:
    """A state machine for a tier; use its ``TestCase``.

    It begins, writes tiles in any order, commits (whole or not), reads, rolls back, freezes,
    releases, closes and reopens, and compares with dictionaries of what was committed and frozen.
    """

    class StoreMachine(RuleBasedStateMachine):
        @initialize(
            numel=st.integers(1, 5000),
            slots=st.integers(1, 3),
            recovery=st.sampled_from(["step", "none"]),
        )
        def make(self, numel: int, slots: int, recovery: str) -> None:
            import torch

            self.directory = Path(tempfile.mkdtemp())
            self.config = TierConfig(
                tier=store_class.tier, directories=(self.directory,), slots=slots, recovery=recovery
            )
            self.device = open_device(torch.device("cpu"))
            self.store = store_class(self.config, self.device, Identity(nonce="model"))
            self.store.allocate(
                [make_optimizer(numel=numel, chunk_numel=2048), make_optimizer("opt-1", 700)]
            )
            self.committed: dict[tuple[ArrayKey, int], bytes] = {}
            self.pending: dict[tuple[ArrayKey, int], bytes] = {}
            self.frozen: dict[str, dict[tuple[ArrayKey, int], bytes]] = {}
            self.step = 0
            self.writing = False
            self.broken = False

        def _missing(self) -> list[tuple[ArrayKey, int]]:
            return [
                (key, tile)
                for entry in self.store.optimizers.values()
                for key in entry.keys()
                for tile in range(entry.layout.n_tiles)
                if (key, tile) not in self.pending
            ]

        @precondition(lambda self: not self.writing and not self.broken)
        @rule()
        def begin(self) -> None:
            self.store.begin()
            self.writing, self.pending = True, {}

        @precondition(lambda self: self.writing and self._missing())
        @rule(data=st.data(), seed=st.integers(0, 2**31), share=st.sampled_from([0.3, 1.0]))
        def write(self, data: st.DataObject, seed: int, share: float) -> None:
            missing = data.draw(st.permutations(self._missing()))
            for key, tile in missing[: max(1, int(len(missing) * share))]:
                values = tile_values(self.store.optimizers[key.optimizer], key, tile, seed)
                self.store.write(key, tile, values).settled.result(timeout=60)
                self.pending[key, tile] = _bits(values)

        @precondition(lambda self: self.writing)
        @rule()
        def commit(self) -> None:
            if self._missing():
                with pytest.raises(StateError, match="was not written"):
                    self.store.commit(self.step + 1, {})
                self.broken = True
            else:
                self.step += 1
                self.store.commit(self.step, {"step": self.step})
                self.committed = dict(self.pending)
            self.writing = False

        @precondition(lambda self: not self.writing and not self.broken)
        @rule(seed=st.integers(0, 2**31))
        def whole_step(self, seed: int) -> None:
            # Two or three of them in a row, which the rules above hardly ever come to.
            self.begin()
            for key, tile in self._missing():
                values = tile_values(self.store.optimizers[key.optimizer], key, tile, seed)
                self.store.write(key, tile, values).settled.result(timeout=60)
                self.pending[key, tile] = _bits(values)
            self.commit()

        @precondition(lambda self: self.writing or self.broken)
        @rule()
        def rollback(self) -> None:
            if self.store.capabilities.rollback and self.committed:
                self.store.rollback()
                self.writing = self.broken = False
            else:
                with pytest.raises(StateError):
                    self.store.rollback()

        @precondition(lambda self: not self.writing and not self.broken)
        @rule(name=st.sampled_from("abc"))
        def freeze(self, name: str) -> None:
            if self.store.capabilities.freeze and self.committed and name not in self.frozen:
                self.store.freeze(name)
                self.frozen[name] = dict(self.committed)
            else:
                with pytest.raises(StateError):
                    self.store.freeze(name)

        @rule(name=st.sampled_from("abc"))
        def release(self, name: str) -> None:
            if self.frozen.pop(name, None) is not None:
                self.store.release(name)
            else:
                with pytest.raises(StateError):
                    self.store.release(name)

        @precondition(lambda self: self.store.capabilities.durable)
        @rule()
        def reopen(self) -> None:
            path = Path(str(getattr(self.store, "path", "")))
            self.store.close()
            self.store = store_class(self.config, self.device, Identity(nonce="again"))
            clean = not (self.writing or self.broken) or self.config.recovery == "step"
            if self.committed and clean:
                self.store.open(path)
                found = self.store.committed
                if found is None or found.step != self.step:
                    raise AssertionError(f"step {self.step} was committed, {found} was opened")
                self.writing = self.broken = False
            else:
                # Nothing whole is there: it must not open as if it were, and the run starts anew.
                with pytest.raises(ValueError):  # noqa: PT011
                    self.store.open(path)
                self.teardown()
                self.make(1500, self.config.slots, self.config.recovery)

        @invariant()
        def reads_are_the_last_commit(self) -> None:
            in_place = self.writing and not self.store.capabilities.rollback
            if self.broken or in_place or not self.committed:
                return
            for entry in self.store.optimizers.values():
                for key in entry.keys():
                    for tile, found in enumerate(read_array(self.store, key)):
                        if _bits(found) != self.committed[key, tile]:
                            raise AssertionError(f"tile {tile} of {key} is not what was committed")

        @invariant()
        def frozen_files_are_what_was_frozen(self) -> None:
            if set(self.store.frozen()) != set(self.frozen):
                raise AssertionError(f"frozen: {self.store.frozen()}, wanted {set(self.frozen)}")
            for name, wanted in self.frozen.items():
                sources = {str(file.path): file.source for file in self.store.frozen_files(name)}
                for (key, tile), bits in wanted.items():
                    if _stored(self.store, sources, key, tile) != bits + checksum(bits):
                        raise AssertionError(f"tile {tile} of {key} has changed in {name}")

        def teardown(self) -> None:
            store: Any = getattr(self, "store", None)
            if store is not None:
                store.close()
                shutil.rmtree(self.directory)

    return StoreMachine


def _stored(store: TierStore, files: Mapping[str, Path], key: ArrayKey, tile: int) -> bytes:
    """A tile and its checksum, out of the file that holds it."""
    entry = store.optimizers[key.optimizer]
    form, grid = entry.formats[key.name], entry.layout.tile(tile)
    with files[f"{key}/{form.chunk_key(grid.chunk)}"].open("rb") as file:
        file.seek(form.tile_offset(grid.place))
        return file.read(form.tile_nbytes + CHECKSUM_NBYTES)


def _bits(tensor: torch.Tensor) -> bytes:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
