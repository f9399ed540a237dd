"""The cpu tier: the conformance suite, and what is its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tierstore.backends import pinned
from tierstore.backends._host_memory import HostSlab
from tierstore.backends.pinned import PinnedStore
from tierstore.config import TierConfig
from tierstore.device import CpuDevice, Device
from tierstore.errors import ConfigError, LayoutError, StateError
from tierstore.records import Identity, OptimizerLayout
from tierstore.testing.conformance import (
    TierStoreTests,
    make_optimizer,
    read_array,
    tile_values,
    write_generation,
)
from tierstore.testing.stateful import store_machine


def test_a_cap_below_the_state_is_refused_with_the_number() -> None:
    config = TierConfig(tier="cpu", host_memory_nbytes=100_000)
    with PinnedStore(config, CpuDevice(), Identity(nonce="x")) as store:
        store.allocate([make_optimizer(numel=8 * 1024)])
        assert store.host_nbytes <= 100_000
    with (
        PinnedStore(config, CpuDevice(), Identity(nonce="x")) as store,
        pytest.raises(ConfigError, match="the state is 110,592 bytes"),
    ):
        store.allocate([make_optimizer(numel=8 * 1024 + 1)])


class TestCpu(TierStoreTests):
    store_class = PinnedStore


TestCpuModel = store_machine(PinnedStore).TestCase
TestCpuModel.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


# Tiles and chunks of every size, an array of a narrow type, and an optimizer of which this rank
# owns nothing.
CHAIN = [
    make_optimizer(),
    make_optimizer(
        "opt-1",
        9000,
        tile_numel=4096,
        chunk_numel=4096,
        arrays={"main": "float32", "exp_avg": "bfloat16", "exp_avg_sq": "float8_e4m3fn"},
    ),
    make_optimizer("opt-2", 0),
    make_optimizer("opt-3", 5000, tile_numel=2048, chunk_numel=4096),
]


def make_store(optimizers: list[OptimizerLayout], **options: Any) -> PinnedStore:
    config = TierConfig(tier="cpu", slots=2, **options)
    store = PinnedStore(config, CpuDevice(), Identity(nonce="x"))
    store.allocate(optimizers)
    return store


def tiles(store: PinnedStore, name: str, tile: int, seed: int) -> dict[str, torch.Tensor]:
    entry = store.optimizers[name]
    return {key.name: tile_values(entry, key, tile, seed) for key in entry.keys()}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def holds(store: PinnedStore, seed: int) -> bool:
    return all(
        bits(found) == bits(tile_values(entry, key, tile, seed))
        for entry in store.optimizers.values()
        for key in entry.keys()
        for tile, found in enumerate(read_array(store, key))
    )


def test_whole_tiles_are_read_as_single_arrays_are() -> None:
    with make_store(CHAIN) as store:
        write_generation(store, 1)
        for entry in CHAIN:
            for tile in range(entry.layout.n_tiles):
                outs = tiles(store, entry.name, tile, 0)
                store.read_tile(entry.name, tile, outs).settled.result(timeout=60)
                wanted = tiles(store, entry.name, tile, 1)
                assert {name: bits(out) for name, out in outs.items()} == {
                    name: bits(values) for name, values in wanted.items()
                }


def test_whole_tiles_are_written_as_single_arrays_are() -> None:
    with make_store(CHAIN) as store:
        store.begin()
        for entry in reversed(CHAIN):
            for tile in reversed(range(entry.layout.n_tiles)):
                transfer = store.write_tile(entry.name, tile, tiles(store, entry.name, tile, 3))
                transfer.settled.result(timeout=60)
        store.commit(3, {})
        assert holds(store, 3)


def test_a_chain_whose_tiles_differ_in_size_keeps_every_bit() -> None:
    with make_store(CHAIN) as store:
        for seed in (1, 2):
            write_generation(store, seed)
            assert holds(store, seed)
        assert store.host_nbytes == sum(
            form.tile_nbytes * entry.layout.n_tiles
            for entry in CHAIN
            for form in entry.formats.values()
        )


def test_whole_tiles_are_checked_as_single_arrays_are() -> None:
    with make_store(CHAIN) as store:
        values = tiles(store, "opt-0", 0, 1)
        with pytest.raises(StateError, match="nothing was committed"):
            store.read_tile("opt-0", 0, values)
        with pytest.raises(StateError, match="between steps"):
            store.write_tile("opt-0", 0, values)
        store.begin()
        with pytest.raises(LayoutError, match="no optimizer"):
            store.write_tile("opt-9", 0, values)
        with pytest.raises(LayoutError, match="contiguous elements"):
            store.write_tile("opt-0", 0, {**values, "exp_avg": torch.zeros(2048)[::2]})
        store.write_tile("opt-0", 0, values).settled.result(timeout=60)
        with pytest.raises(StateError, match="written twice"):
            store.write_tile("opt-0", 0, values)


def test_the_page_lock_is_cut_where_a_chunk_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, list[int]]] = []

    def slab(nbytes: int, device: Device, cuts: Iterable[int] = ()) -> HostSlab:
        made.append((nbytes, list(cuts)))
        return HostSlab(nbytes, device, made[-1][1])

    monkeypatch.setattr(pinned, "HostSlab", slab)
    with make_store(CHAIN) as store:
        ((nbytes, cuts),) = made
        starts = [
            store._bytes(key, chunk * entry.layout.tiles_per_chunk).start
            for entry in CHAIN
            for key in entry.keys()
            for chunk in range(entry.layout.n_chunks)
        ]
        assert cuts == starts == sorted(set(starts))
        assert all(cut % 4096 == 0 for cut in cuts)
        assert cuts[-1] < nbytes == store.host_nbytes


def test_a_rank_that_owns_nothing_has_a_store_all_the_same() -> None:
    with make_store([make_optimizer(numel=0)]) as store:
        write_generation(store, 1)
        assert holds(store, 1)
