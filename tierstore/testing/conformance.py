"""The suite that every tier passes: subclass `TierStoreTests` and say which class is meant.

::

    class TestMyTier(TierStoreTests):
        store_class = MyStore
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from tierstore.config import TierConfig
from tierstore.device import Device, open_device
from tierstore.errors import (
    CapacityError,
    ConfigError,
    LayoutError,
    StateError,
    TierStoreError,
)
from tierstore.layout import Shard, StateLayout
from tierstore.records import ArrayKey, Commit, Identity, OptimizerLayout
from tierstore.store import TierStore

if TYPE_CHECKING:
    import torch

__all__ = ["TierStoreTests", "make_optimizer", "read_array", "tile_values", "write_generation"]


def make_optimizer(
    name: str = "opt-0",
    numel: int = 10_000,
    *,
    tile_numel: int = 1024,
    chunk_numel: int = 3072,
    arrays: dict[str, str] | None = None,
) -> OptimizerLayout:
    """Arrays over one parameter of `numel` elements; by default main and two moments."""
    if arrays is None:
        arrays = dict.fromkeys(("main", "exp_avg", "exp_avg_sq"), "float32")
    shards = [Shard(name="weight", numel=numel, array_start=0, local_shape=(numel,))]
    layout = StateLayout.plan(shards, chunk_numel=chunk_numel, tile_numel=tile_numel)
    return OptimizerLayout(name=name, layout=layout, arrays=arrays)


def tile_values(optimizer: OptimizerLayout, key: ArrayKey, tile: int, seed: int) -> torch.Tensor:
    """The random bits that `write_generation` gives a tile: padding included, NaN and -0 too."""
    import torch

    entropy = [seed, tile, *key.optimizer.encode(), *key.name.encode()]
    bits = np.random.default_rng(entropy).integers(
        0, 256, optimizer.formats[key.name].tile_nbytes, dtype=np.uint8
    )
    dtype: torch.dtype = getattr(torch, optimizer.arrays[key.name])
    return torch.from_numpy(bits).view(dtype)


def write_generation(store: TierStore, seed: int, *, commit: bool = True) -> None:
    """Write random bits to every tile, one tile at a time, and commit them as step `seed`."""
    store.begin()
    for optimizer in store.optimizers.values():
        for tile in range(optimizer.layout.n_tiles):
            transfers = [
                store.write(key, tile, _on_device(store, tile_values(optimizer, key, tile, seed)))
                for key in optimizer.keys()
            ]
            for transfer in transfers:
                transfer.settled.result(timeout=60)
    if commit:
        store.commit(seed, {"seed": seed})


def read_array(store: TierStore, key: ArrayKey) -> list[torch.Tensor]:
    """All tiles of an array, on the CPU."""
    import torch

    optimizer = store.optimizers[key.optimizer]
    tiles = []
    for tile in range(optimizer.layout.n_tiles):
        dtype = getattr(torch, optimizer.arrays[key.name])
        out = store.device.empty(optimizer.formats[key.name].tile_nbytes).view(dtype)
        transfer = store.read(key, tile, out)
        store.device.wait(transfer.device_done.result(timeout=60))
        transfer.settled.result(timeout=60)
        tiles.append(out.cpu())
    return tiles


def _on_device(store: TierStore, values: torch.Tensor) -> torch.Tensor:
    moved = values.to(store.device.torch_device)
    store.device.synchronize()
    return moved


def _bits(tensor: torch.Tensor) -> bytes:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class TierStoreTests:
    """What holds for every tier.

    A subclass sets `store_class`; it may override the fixtures `config` (a small configuration
    that the tier can run with) and `device`.
    """

    store_class: ClassVar[type[TierStore]]

    @pytest.fixture
    def config(self, tmp_path: Path) -> TierConfig:
        """A configuration that the tier runs with."""
        return TierConfig(
            tier=self.store_class.tier, directories=(tmp_path / "stores",), slots=2, timeout_s=60.0
        )

    @pytest.fixture
    def device(self) -> Device:
        """Where tensors are."""
        import torch

        return open_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    @pytest.fixture
    def fresh(self, config: TierConfig, device: Device) -> Iterator[TierStore]:
        """A store that is not allocated."""
        store = self.store_class(config, device, Identity(nonce="0badcafe"))
        yield store
        store.close()

    @pytest.fixture
    def store(self, fresh: TierStore) -> TierStore:
        """A store of two optimizers with nothing committed."""
        fresh.allocate([make_optimizer(), make_optimizer("opt-1", 1500, chunk_numel=1024)])
        return fresh

    def _expect(self, store: TierStore, seed: int) -> None:
        for optimizer in store.optimizers.values():
            for key in optimizer.keys():
                for tile, found in enumerate(read_array(store, key)):
                    wanted = tile_values(optimizer, key, tile, seed)
                    _same(_bits(found), _bits(wanted), f"tile {tile} of {key}")

    def test_probe_says_how_bytes_move(self, config: TierConfig, device: Device) -> None:
        """The probe runs and names a mode."""
        probe = self.store_class.probe(config, device)
        _same((probe.ok, probe.reason if not probe.ok else ""), (True, ""), "the probe")
        _same(probe.tier, self.store_class.tier, "the tier's name")
        _same(bool(probe.mode), True, "whether the mode is named")

    def test_reads_what_was_committed(self, store: TierStore) -> None:
        """Every bit of every tile comes back, over several generations."""
        for seed in (1, 2, 3):
            write_generation(store, seed)
            _same(store.committed, Commit(step=seed, state={"seed": seed}), "the commit")
            self._expect(store, seed)

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
    def test_every_type(self, fresh: TierStore, dtype: str) -> None:
        """Arrays of narrow types stand beside fp32 ones."""
        arrays = {"main": "float32", "exp_avg": dtype}
        fresh.allocate([make_optimizer(tile_numel=4096, chunk_numel=8192, arrays=arrays)])
        write_generation(fresh, 5)
        self._expect(fresh, 5)

    @pytest.mark.parametrize("numel", [0, 1, 1024, 1025])
    def test_odd_sizes(self, fresh: TierStore, numel: int) -> None:
        """An empty array, one element, exactly one tile, one element more."""
        fresh.allocate([make_optimizer(numel=numel)])
        write_generation(fresh, 1)
        self._expect(fresh, 1)

    def test_source_may_change_after_device_done(self, store: TierStore) -> None:
        """What is written is what the tensor held until ``device_done``."""
        store.begin()
        for optimizer in store.optimizers.values():
            for tile in range(optimizer.layout.n_tiles):
                for key in optimizer.keys():
                    values = _on_device(store, tile_values(optimizer, key, tile, 7))
                    transfer = store.write(key, tile, values)
                    store.device.wait(transfer.device_done.result(timeout=60))
                    values.zero_()
                    transfer.settled.result(timeout=60)
        store.commit(7, {})
        self._expect(store, 7)

    def test_a_full_window_at_once(self, store: TierStore) -> None:
        """As many tiles as the store allows are on their way in and out at the same time."""
        write_generation(store, 1)
        optimizer = store.optimizers["opt-0"]
        store.begin()
        tiles = range(min(store.read_sets, store.write_sets, optimizer.layout.n_tiles))
        outs: dict[tuple[ArrayKey, int], Any] = {}
        for tile in tiles:
            for key in optimizer.keys():
                out = _on_device(store, tile_values(optimizer, key, tile, 0))
                outs[key, tile] = (out, store.read(key, tile, out))
        for (key, tile), (out, transfer) in outs.items():
            transfer.settled.result(timeout=60)
            store.device.synchronize()
            wanted = tile_values(optimizer, key, tile, 1)
            _same(_bits(out.cpu()), _bits(wanted), f"tile {tile} of {key}")
        writes = [
            store.write(key, tile, _on_device(store, tile_values(optimizer, key, tile, 2)))
            for tile in tiles
            for key in optimizer.keys()
        ]
        for write in writes:
            write.settled.result(timeout=60)

    def test_order_of_calls(self, fresh: TierStore) -> None:
        """Calls that the state forbids are refused, and change nothing."""
        optimizer = make_optimizer()
        key, out = ArrayKey("opt-0", "main"), fresh.device.empty(4096).view(_float32())
        for early in (fresh.begin, lambda: fresh.read(key, 0, out), lambda: fresh.commit(1, {})):
            with pytest.raises(StateError):
                early()
        fresh.allocate([optimizer])
        with pytest.raises(StateError):
            fresh.allocate([optimizer])
        with pytest.raises(StateError, match="nothing was committed"):
            fresh.read(key, 0, out)
        with pytest.raises(StateError, match="between steps"):
            fresh.write(key, 0, out)
        write_generation(fresh, 1)
        fresh.begin()
        with pytest.raises(StateError, match="middle of a step"):
            fresh.begin()
        with pytest.raises(StateError, match="middle of a step"):
            fresh.snapshot(Path("nowhere"))

    def test_what_does_not_fit_is_refused(self, store: TierStore) -> None:
        """Wrong array, tile, length, type or stride."""
        write_generation(store, 1)
        empty = store.device.empty
        key = ArrayKey("opt-0", "main")
        good = empty(4096).view(_float32())
        for wrong_key in (ArrayKey("opt-7", "main"), ArrayKey("opt-0", "momentum")):
            with pytest.raises(LayoutError):
                store.read(wrong_key, 0, good)
        for tile in (-1, 10):
            with pytest.raises(LayoutError):
                store.read(key, tile, good)
        strided = empty(8192).view(_float32())[::2]
        for out in (empty(4092).view(_float32()), empty(1024), strided):
            with pytest.raises(LayoutError):
                store.read(key, 0, out)
        self._expect(store, 1)

    def test_a_missing_tile_is_refused_at_commit(self, store: TierStore) -> None:
        """A generation is whole or it is not committed."""
        write_generation(store, 1)
        store.begin()
        optimizer = store.optimizers["opt-0"]
        key = optimizer.keys()[0]
        store.write(key, 0, _on_device(store, tile_values(optimizer, key, 0, 2)))
        with pytest.raises(StateError, match="was not written"):
            store.commit(2, {})
        with pytest.raises(StateError, match="failed"):
            store.begin()

    def test_a_tile_written_twice_is_refused(self, store: TierStore) -> None:
        """One writer, once."""
        store.begin()
        optimizer = store.optimizers["opt-0"]
        key = optimizer.keys()[0]
        values = _on_device(store, tile_values(optimizer, key, 0, 2))
        store.write(key, 0, values).settled.result(timeout=60)
        with pytest.raises(StateError, match="twice"):
            store.write(key, 0, values)

    def test_rollback(self, store: TierStore) -> None:
        """An unfinished generation is undone where the tier can, and refused where it can't."""
        write_generation(store, 1)
        write_generation(store, 2, commit=False)
        if not store.capabilities.rollback:
            with pytest.raises(StateError, match="no finished step"):
                store.rollback()
            return
        self._expect(store, 1)
        store.rollback()
        self._expect(store, 1)
        write_generation(store, 3)
        self._expect(store, 3)

    def test_closed_stores_refuse(self, store: TierStore) -> None:
        """Closing twice is fine; using a closed store is not."""
        write_generation(store, 1)
        store.close()
        store.close()
        with pytest.raises(StateError, match="closed"):
            store.begin()

    def test_no_room_is_found_at_allocation(self, fresh: TierStore) -> None:
        """More than any machine has: refused before the first step, nothing left behind."""
        huge = make_optimizer(numel=2**50, tile_numel=2**22, chunk_numel=197_132_288)
        with pytest.raises(CapacityError) as caught:
            fresh.allocate([huge])
        _same(caught.value.errno in (errno.ENOSPC, errno.ENOMEM), True, "whether errno is kept")
        left = [path for top in fresh.config.directories for path in top.rglob("rank-*")]
        _same(left, [], "what was left behind")

    def test_snapshot_opens_with_zarr(self, store: TierStore, tmp_path: Path) -> None:
        """A snapshot is a tree of zarr arrays, and stays what it was when training goes on."""
        import zarr

        write_generation(store, 4)
        store.snapshot(tmp_path / "snapshot")
        write_generation(store, 5)
        write_generation(store, 6)
        generation = tmp_path / "snapshot" / "rank-00000" / "gen-a"
        for optimizer in store.optimizers.values():
            for key in optimizer.keys():
                found = zarr.open_array(generation / str(key), mode="r")
                _same(_elements(found), _wanted(optimizer, key, 4), f"the snapshot's {key}")
        record = json.loads((generation / "zarr.json").read_text())["attributes"]["tierstore"]
        _same((record["state"], record["step"]), ("complete", 4), "the snapshot's record")
        with pytest.raises(TierStoreError, match="exists"):
            store.snapshot(tmp_path / "snapshot")

    def _require_freezing(self, store: TierStore) -> None:
        if not store.capabilities.freeze:
            pytest.skip(
                f"the {store.tier} tier does not freeze: it has one generation, or no files"
            )

    def _expect_frozen(self, store: TierStore, name: str, seed: int) -> None:
        import zarr

        place = Path(str(getattr(store, "path", ""))) / "frozen" / name
        for optimizer in store.optimizers.values():
            for key in optimizer.keys():
                found = zarr.open_array(place / str(key), mode="r")
                _same(_elements(found), _wanted(optimizer, key, seed), f"{key}, frozen as {name}")
        record = json.loads((place / "zarr.json").read_text())["attributes"]["tierstore"]
        _same((record["state"], record["step"]), ("complete", seed), f"the record of {name}")

    @contextlib.contextmanager
    def no_room(self) -> Iterator[None]:
        """Let no file get any bytes; override it for a tier that reserves in another way."""

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse)
            yield

    def test_what_can_not_freeze_says_so(self, store: TierStore) -> None:
        """Refused with a typed error, and nothing is listed."""
        if store.capabilities.freeze:
            pytest.skip("the tier can freeze")
        write_generation(store, 1)
        with pytest.raises(StateError, match="snapshot"):
            store.freeze("a")
        _same(store.frozen(), {}, "what is frozen")
        for call in (store.release, store.frozen_files):
            with pytest.raises(StateError, match="nothing frozen"):
                call("a")
        self._expect(store, 1)

    def test_frozen_bits_stay(self, store: TierStore) -> None:
        """Frozen generations are what they were, while later ones are written and frozen."""
        self._require_freezing(store)
        write_generation(store, 1)
        store.freeze("step-1")
        write_generation(store, 2)
        store.freeze("step-2")
        store.freeze("again")
        for seed in (3, 4, 5):
            write_generation(store, seed)
            self._expect(store, seed)
            self._expect_frozen(store, "step-1", 1)
            self._expect_frozen(store, "step-2", 2)
            self._expect_frozen(store, "again", 2)
        commits = {"step-1": 1, "again": 2, "step-2": 2}
        found = {name: commit.step for name, commit in store.frozen().items()}
        _same(list(found.items()), list(commits.items()), "what is frozen")
        _same(store.frozen()["step-1"], Commit(step=1, state={"seed": 1}), "the commit")

    def test_releasing(self, store: TierStore) -> None:
        """What is released is gone, and its name is free; the rest stays."""
        self._require_freezing(store)
        write_generation(store, 1)
        store.freeze("a")
        store.freeze("b")
        write_generation(store, 2)
        store.release("a")
        with pytest.raises(StateError, match="nothing is frozen as 'a'"):
            store.release("a")
        with pytest.raises(StateError, match="nothing is frozen as 'a'"):
            store.frozen_files("a")
        write_generation(store, 3)
        store.freeze("a")
        write_generation(store, 4)
        write_generation(store, 5)
        self._expect_frozen(store, "a", 3)
        self._expect_frozen(store, "b", 1)
        store.release("a")
        store.release("b")
        _same(store.frozen(), {}, "what is frozen")
        write_generation(store, 6)
        self._expect(store, 6)

    def test_what_is_not_to_be_frozen(self, store: TierStore) -> None:
        """Names that are none, names in use, and states that are not the last commit's."""
        self._require_freezing(store)
        with pytest.raises(StateError, match="nothing was committed"):
            store.freeze("a")
        write_generation(store, 1)
        for name in ("", ".", "..", ".a", "a/b", "a b", "x" * 65, "../gen-a", "zarr.json"):
            for call in (store.freeze, store.release, store.frozen_files):
                with pytest.raises(ConfigError, match="can't be the name"):
                    call(name)
        store.freeze("a")
        with pytest.raises(StateError, match="already"):
            store.freeze("a")
        store.begin()
        with pytest.raises(StateError, match="middle of a step"):
            store.freeze("b")
        _same(list(store.frozen()), ["a"], "what is frozen")

    def test_a_frozen_generation_can_be_copied(self, store: TierStore, tmp_path: Path) -> None:
        """All files are named, the one that says that it is whole last, and no links are."""
        import zarr

        self._require_freezing(store)
        write_generation(store, 1)
        store.freeze("a")
        write_generation(store, 2)
        write_generation(store, 3)
        for path, source, nbytes in (files := list(store.frozen_files("a"))):
            target = tmp_path / "copy" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            _same((target.stat().st_size, source.is_symlink()), (nbytes, False), str(source))
        _same(files[-1].path, Path("zarr.json"), "the last file")
        store.release("a")
        for optimizer in store.optimizers.values():
            for key in optimizer.keys():
                found = zarr.open_array(tmp_path / "copy" / str(key), mode="r")
                _same(_elements(found), _wanted(optimizer, key, 1), f"the copy's {key}")

    def test_no_room_to_freeze(self, store: TierStore) -> None:
        """Freezing reserves what the coming steps need; where it can't, nothing has happened."""
        self._require_freezing(store)
        write_generation(store, 1)
        top = Path(str(getattr(store, "path", "")))
        before = sorted(top.rglob("*"))
        with self.no_room(), pytest.raises(CapacityError) as caught:
            store.freeze("a")
        _same(caught.value.errno, errno.ENOSPC, "the errno")
        _same(store.frozen(), {}, "what is frozen")
        _same(sorted(top.rglob("*")), before, "what is there")
        write_generation(store, 2)
        write_generation(store, 3)
        self._expect(store, 3)

    def test_reopening(self, store: TierStore, device: Device) -> None:
        """A durable store is found again with step, counters and bits; memory says it is not."""
        write_generation(store, 8)
        path = Path(getattr(store, "path", "nowhere"))
        store.close()
        again = self.store_class(store.config, device, Identity(nonce="another"))
        if not store.capabilities.durable:
            with pytest.raises(StateError, match="memory"):
                again.open(path)
            return
        again.open(path)
        _same(again.committed, Commit(step=8, state={"seed": 8}), "the commit")
        self._expect(again, 8)
        write_generation(again, 9)
        self._expect(again, 9)
        again.close()

    def test_reopening_finds_what_is_frozen(self, store: TierStore, device: Device) -> None:
        """It is listed again, keeps its bits, and can be released."""
        self._require_freezing(store)
        write_generation(store, 1)
        store.freeze("a")
        write_generation(store, 2)
        store.freeze("b")
        frozen, path = store.frozen(), Path(str(getattr(store, "path", "")))
        store.close()
        with self.store_class(store.config, device, Identity(nonce="another")) as again:
            again.open(path)
            _same(again.frozen(), frozen, "what is frozen")
            write_generation(again, 3)
            write_generation(again, 4)
            self._expect_frozen(again, "a", 1)
            self._expect_frozen(again, "b", 2)
            again.release("a")
            write_generation(again, 5)
            self._expect(again, 5)
            self._expect_frozen(again, "b", 2)

    def test_a_second_owner_is_refused(self, store: TierStore, device: Device) -> None:
        """Two stores never share a directory, and the second one touches nothing."""
        if not store.capabilities.durable:
            pytest.skip("the tier is memory: there is no directory to share")
        write_generation(store, 1)
        twin = self.store_class(store.config, device, store.identity)
        with pytest.raises(StateError, match="exists"):
            twin.allocate([make_optimizer()])
        other = self.store_class(store.config, device, Identity(nonce="another"))
        with pytest.raises(StateError, match="in use"):
            other.open(Path(str(getattr(store, "path", ""))))
        self._expect(store, 1)


def _elements(array: Any) -> bytes:
    return np.asarray(array[:]).tobytes()


def _wanted(optimizer: OptimizerLayout, key: ArrayKey, seed: int) -> bytes:
    """What zarr has to read of an array that `write_generation` wrote: no padding."""
    tiles = [_bits(tile_values(optimizer, key, i, seed)) for i in range(optimizer.layout.n_tiles)]
    itemsize = optimizer.formats[key.name].type.itemsize
    return b"".join(tiles)[: optimizer.layout.numel * itemsize]


def _same(found: object, wanted: object, what: str) -> None:
    # Not by the assert statement: this module is part of the package and may run under -O.
    if found != wanted:
        raise AssertionError(f"{what}: found {repr(found)[:200]}, wanted {repr(wanted)[:200]}")


def _float32() -> torch.dtype:
    import torch

    return torch.float32
