"""Several directories: shares, space, the order of a sweep, and what lies where."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st

from tests.test_binding import STEPS, OnTier, Plan, Twins
from tierstore.adapters.megatron.buckets import lay_out
from tierstore.backends import _direct_io, _placement
from tierstore.backends.posix import PosixStore
from tierstore.config import TierConfig
from tierstore.device import CpuDevice
from tierstore.errors import (
    CapacityError,
    ConfigError,
    CorruptError,
    StateError,
    TierStoreError,
    TransferError,
)
from tierstore.records import ArrayKey, Identity
from tierstore.state import RankState
from tierstore.testing.conformance import (
    TierStoreTests,
    make_optimizer,
    read_array,
    tile_values,
    write_generation,
)

# Chunks of make_optimizer(numel=NUMEL): 24, which these rates divide into 12, 8 and 4.
NUMEL = 24 * 3072
RATES = [3e9, 2e9, 1e9]


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_placement, "measure", lambda directories: RATES[: len(directories)])


def named(tmp_path: Path, letters: str = "abc") -> tuple[Path, ...]:
    return tuple(tmp_path / letter for letter in letters)


def make_store(directories: Sequence[Path], **options: Any) -> PosixStore:
    config = TierConfig(tier="nvme", directories=tuple(directories), slots=2, **options)
    return PosixStore(config, CpuDevice(), Identity(nonce="0badcafe"))


def allocate(store: PosixStore) -> None:
    store.allocate([make_optimizer(numel=NUMEL), make_optimizer("opt-1", 1500, chunk_numel=1024)])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PosixStore]:
    made = make_store(named(tmp_path))
    allocate(made)
    write_generation(made, 1)
    yield made
    made.close()


def holds(store: PosixStore, seed: int) -> bool:
    return all(
        found.view(torch.uint8).equal(tile_values(entry, key, tile, seed).view(torch.uint8))
        for entry in store.optimizers.values()
        for key in entry.keys()
        for tile, found in enumerate(read_array(store, key))
    )


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("c/*") if not path.is_symlink()]


class TestThreeDirectories(TierStoreTests):
    store_class = PosixStore

    @pytest.fixture
    def config(self, tmp_path: Path) -> TierConfig:
        return TierConfig(tier="nvme", directories=named(tmp_path), slots=2, timeout_s=60.0)


# ------------------------------------------------------------------------- shares, space and order


@given(
    count=st.integers(0, 500),
    drives=st.lists(st.tuples(st.floats(1e3, 1e11), st.integers(0, 500)), min_size=1, max_size=8),
)
def test_shares_are_proportional_within_one_and_keep_to_the_room(
    count: int, drives: list[tuple[float, int]]
) -> None:
    weights, limits = [weight for weight, _ in drives], [limit for _, limit in drives]
    count = min(count, sum(limits))
    shares = _placement.share_out(count, weights, limits)
    assert sum(shares) == count
    assert all(0 <= share <= limit for share, limit in zip(shares, limits, strict=True))
    free = [i for i, share in enumerate(shares) if share < limits[i]]
    left = count - sum(shares[i] for i in range(len(shares)) if i not in free)
    for i in free:
        # Those at their limit leave at least what they would get if they had more room.
        assert shares[i] >= left * weights[i] / sum(weights) - 1 - 1e-6
    unlimited = _placement.share_out(count, weights, [count] * len(weights))
    for share, weight in zip(unlimited, weights, strict=True):
        assert abs(share - count * weight / sum(weights)) < 1 + 1e-6


@given(counts=st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_turns_are_spread_evenly(counts: list[int]) -> None:
    turns = _placement.interleave(counts)
    assert [turns.count(index) for index in range(len(counts))] == counts
    for length in range(len(turns)):
        for index, count in enumerate(counts):
            exact = length * count / len(turns)
            assert abs(turns[:length].count(index) - exact) <= 1 + len(counts) / 2


@given(
    numel=st.integers(0, 40_000),
    chunk_numel=st.integers(1, 8).map(lambda tiles: 1024 * tiles),
    data=st.data(),
)
def test_a_sweep_takes_each_tile_once_and_each_drive_in_order(
    numel: int, chunk_numel: int, data: st.DataObject
) -> None:
    layout = make_optimizer(numel=numel, chunk_numel=chunk_numel).layout
    n_chunks = layout.n_chunks
    places = data.draw(st.lists(st.integers(0, 3), min_size=n_chunks, max_size=n_chunks))
    order = _placement.sweep_order(layout, places)
    assert sorted(order) == list(range(layout.n_tiles))
    of_tile = [places[layout.tile(tile).chunk] for tile in order]
    tiles = [of_tile.count(place) for place in range(4)]
    assert of_tile == _placement.interleave(tiles)
    for place in range(4):
        own = [tile for tile, found in zip(order, of_tile, strict=True) if found == place]
        assert own == sorted(own)


def test_chunks_are_spread_by_rate_and_the_sweep_takes_turns(store: PosixStore) -> None:
    places = store._tree.places["opt-0"]
    assert [places.count(number) for number in range(3)] == [12, 8, 4]
    order = list(store.order("opt-0"))
    turns = [places[store.optimizers["opt-0"].layout.tile(tile).chunk] for tile in order]
    assert turns[:6].count(0) == 3
    assert turns[:6].count(1) == 2
    assert turns[:6].count(2) == 1


def test_a_sweep_goes_by_the_order_of_the_store(tmp_path: Path) -> None:
    # With one slot a tile is visited before the next one is taken up.
    config = TierConfig(tier="nvme", directories=named(tmp_path), slots=1)
    with PosixStore(config, CpuDevice(), Identity(nonce="0badcafe")) as store:
        state = RankState(store, [make_optimizer(numel=NUMEL)], dict, restore=lambda state: None)
        state.fill({"opt-0": lambda views: None})
        tiles: list[int] = []
        state.advance("opt-0", lambda views: tiles.append(views.tile.index), lambda: None)
        assert tiles == list(store.order("opt-0"))
        assert tiles != sorted(tiles)


def test_one_directory_is_swept_from_front_to_back(tmp_path: Path) -> None:
    with make_store(named(tmp_path, "a")) as store:
        allocate(store)
        assert list(store.order("opt-0")) == list(range(72))
        assert not [path for path in store.path.rglob("c/*") if path.is_symlink()]


@pytest.fixture
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """Chunks of make_optimizer(numel=NUMEL), two generations each, that fit into a directory."""
    nbytes = 2 * sum(form.file_nbytes(3) for form in make_optimizer().formats.values())
    chunks: dict[Path, int] = {}
    # They are on one file system, of whose space each takes a third.
    monkeypatch.setattr(_placement, "free_nbytes", lambda path: 3 * chunks[path] * nbytes + 3)
    for directory in named(tmp_path):
        directory.mkdir()
    return chunks


@pytest.mark.parametrize(
    ("free", "counts"),
    [((24, 4, 24), [15, 4, 5]), ((0, 24, 24), [0, 16, 8]), ((8, 8, 8), [8, 8, 8])],
)
def test_space_limits_the_shares(
    free: Sequence[int], counts: list[int], rooms: dict[Path, int], tmp_path: Path
) -> None:
    rooms.update(zip(named(tmp_path), free, strict=True))
    optimizers = {"opt-0": make_optimizer(numel=NUMEL)}
    places = _placement.place_chunks(optimizers, named(tmp_path), 2, RATES)["opt-0"]
    assert [places.count(number) for number in range(3)] == counts


def test_later_optimizers_get_what_space_the_earlier_ones_left(
    rooms: dict[Path, int], tmp_path: Path
) -> None:
    rooms.update(zip(named(tmp_path), (13, 30, 30), strict=True))
    optimizers = {name: make_optimizer(name, NUMEL) for name in ("opt-0", "opt-1")}
    places = _placement.place_chunks(optimizers, named(tmp_path), 2, RATES)
    assert [places["opt-0"].count(number) for number in range(3)] == [12, 8, 4]
    assert places["opt-1"].count(0) == 1
    optimizers["opt-2"] = make_optimizer("opt-2", NUMEL + 1024)
    rooms[tmp_path / "c"] = 29
    with pytest.raises(
        CapacityError, match=rf"25 chunks of opt-2.*do not fit whole.* {tmp_path}/c"
    ):
        _placement.place_chunks(optimizers, named(tmp_path), 2, RATES)


def test_too_little_space_names_all_directories_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_placement, "free_nbytes", lambda path: 1000)
    a, b = named(tmp_path, "ab")
    with pytest.raises(CapacityError, match=rf"needs [\d,]+ bytes.*1,000 .*in {a} and {b}\."):
        allocate(make_store([a, b]))
    assert list(a.iterdir()) + list(b.iterdir()) == []


def test_the_log_says_what_each_directory_showed_and_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_placement, "measure", lambda directories: [6e9, 2e9, 1e6])
    caplog.set_level("INFO", logger="tierstore")
    a, b, c = named(tmp_path)
    with make_store([a, b, c]) as store:
        store.allocate([make_optimizer(numel=NUMEL)])
    assert f"{a} 6.00 GB/s 18 of 24 chunks, {b} 2.00 GB/s 6 of 24 chunks" in caplog.text
    assert f"{c} gets no chunk" in caplog.text
    assert f"{a} and {b} and {c} are on one file system" in caplog.text
    assert "--optimizer-state-slots=6" in caplog.text


def test_measuring_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real one
    monkeypatch.setattr(_placement, "_SCRATCH_NBYTES", 16 * 2**20)
    a, b = named(tmp_path, "ab")
    a.mkdir()
    b.mkdir()
    found = _placement.measure([a, b])
    assert len(found) == 2
    assert min(found) > 0

    def fail(*_: Any) -> None:
        raise TransferError(errno.EIO, "this drive was told to fail")

    monkeypatch.setattr(_direct_io, "read_full", fail)
    with pytest.raises(TransferError, match="told to fail"):
        _placement.measure([a, b])
    assert list(a.iterdir()) + list(b.iterdir()) == []


def test_small_states_have_enough_chunks_to_spread() -> None:
    config = TierConfig(tier="nvme", directories=(Path("a"), Path("b")), tile_numel=1024)
    assert lay_out([], 100 * 1024, config).n_chunks >= 16
    assert lay_out([], 5 * 1024, config).n_chunks == 5
    one = TierConfig(tier="nvme", directories=(Path("a"),), tile_numel=1024)
    assert lay_out([], 100 * 1024, one).n_chunks == 1


# -------------------------------------------------------------------------------- what lies where


def test_the_first_directory_has_the_tree_and_the_others_their_chunks(
    store: PosixStore, tmp_path: Path
) -> None:
    below = Path("train-0badcafe/rank-00000")
    key = ArrayKey("opt-0", "main")
    for chunk, place in enumerate(store._tree.places["opt-0"]):
        for generation in ("gen-a", "gen-b"):
            file = below / generation / str(key) / f"c/{chunk}"
            real = named(tmp_path)[place] / file
            assert stat.S_ISREG(real.lstat().st_mode)
            assert real.stat().st_blocks * 512 >= real.stat().st_size > 0
            if place:
                assert (tmp_path / "a" / file).readlink() == real
    for letter in "bc":
        about = json.loads((tmp_path / letter / "train-0badcafe/zarr.json").read_text())
        assert about["node_type"] == "group"
        assert about["attributes"]["tierstore"]["part_of"] == str(store.path.parent)
    for path in tmp_path.rglob("*"):
        if not path.is_symlink() and "train" in str(path):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_zarr_reads_every_number_through_the_links(store: PosixStore) -> None:
    root = zarr.open_group(store.path.parent, mode="r")
    for entry in store.optimizers.values():
        for key in entry.keys():
            array = root[f"rank-00000/current/{key}"]
            assert isinstance(array, zarr.Array)
            wanted = torch.cat(read_array(store, key))[: entry.layout.numel].numpy()
            assert np.asarray(array[:]).tobytes() == wanted.tobytes()


def test_a_lost_link_reads_as_nan_in_zarr_and_is_nothing_to_us(store: PosixStore) -> None:
    chunk = store._tree.places["opt-0"].index(1)
    (store.path / f"gen-a/opt-0/main/c/{chunk}").unlink()
    array = zarr.open_array(store.path / "gen-a/opt-0/main", mode="r")
    lost = slice(chunk * 3072, (chunk + 1) * 3072)
    assert np.isnan(np.asarray(array[lost])).all()
    assert holds(store, 1)
    store.close()
    with make_store(store.config.directories) as again:
        again.open(store.path)
        assert holds(again, 1)


def test_a_link_in_place_of_a_chunk_is_not_followed(store: PosixStore, tmp_path: Path) -> None:
    chunk = store._tree.chunk(
        "gen-a", ArrayKey("opt-0", "main"), store._tree.places["opt-0"].index(1)
    )
    shutil.move(chunk.path, tmp_path / "elsewhere")
    chunk.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TransferError, match="symbolic links"):
        read_array(store, ArrayKey("opt-0", "main"))


def test_data_is_on_all_drives_before_the_record_says_so(
    store: PosixStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Path] = []

    def noted(function: Callable[..., None]) -> Callable[..., None]:
        def call(path: Path, *arguments: Any) -> None:
            events.append(path)
            function(path, *arguments)

        return call

    write_generation(store, 2, commit=False)
    monkeypatch.setattr(_direct_io, "sync_data", noted(_direct_io.sync_data))
    monkeypatch.setattr(_direct_io, "write_json", noted(_direct_io.write_json))
    store.commit(2, {})
    chunks = {chunk.path for chunk in store._tree.chunks("gen-b")}
    assert {path.parts[len(tmp_path.parts)] for path in chunks} == set("abc")
    assert set(events[:-2]) == chunks
    assert events[-2:] == [store.path / "gen-b/zarr.json", store.path / "COMMIT/zarr.json"]


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    plan = Plan(numels=(3000, 70, 9000, 5000, 20_000), groups=(0, 1, 0, 1, 0), n_groups=2)
    found = []
    for letters in ("a", "bcd"):
        with make_store(named(tmp_path, letters)) as store:
            driver = OnTier(store, [Twins(plan, torch.optim.AdamW)])
            for _ in range(STEPS):
                driver.step()
            driver.expect_same_bits()
            if len(letters) > 1:
                assert all(files_below(directory) for directory in named(tmp_path, letters))
        path = store.path / "current/opt-0"
        found.append(
            [
                np.asarray(zarr.open_array(path / name, mode="r")[:]).tobytes()
                for name in ("main", "exp_avg", "exp_avg_sq")
            ]
        )
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------ opening again


def test_a_spread_store_opens_again(store: PosixStore) -> None:
    store.close()
    with make_store(store.config.directories) as again:
        again.open(store.path)
        assert again.order("opt-0") == store.order("opt-0")
        assert holds(again, 1)
        write_generation(again, 2)
        assert holds(again, 2)


def test_directories_that_are_not_those_of_the_run_are_refused(
    store: PosixStore, tmp_path: Path
) -> None:
    store.close()
    a, b, c = named(tmp_path)
    for directories, error, said in [
        ((a,), ConfigError, "directory 2, 3 of --optimizer-state-dir"),
        ((a, b), ConfigError, "directory 3 of --optimizer-state-dir"),
        ((a, c, b), CorruptError, "directory 2, 3 of --optimizer-state-dir"),
        ((a, b, tmp_path / "d"), CorruptError, "directory 3 of --optimizer-state-dir"),
    ]:
        with pytest.raises(error, match=said) as raised:
            make_store(directories).open(store.path)
        assert "in the same order" in str(raised.value)
    with pytest.raises(CorruptError, match="missing"):
        make_store((b, a, c)).open(b / "train-0badcafe/rank-00000")


@pytest.mark.parametrize(
    ("places", "error"),
    [
        ([3] * 24, ConfigError),
        ([10**30] * 24, ConfigError),
        ([-1] * 24, CorruptError),
        ([0.0] * 24, CorruptError),
        ([True] * 24, CorruptError),
        (["../../etc"] * 24, CorruptError),
        ([[0]] * 24, CorruptError),
        ([0] * 23, CorruptError),
        ([0] * 25, CorruptError),
        ([], CorruptError),
        ({"0": 0}, CorruptError),
        ("0" * 24, CorruptError),
        (None, CorruptError),
    ],
    ids=str,
)
def test_places_that_somebody_else_wrote_are_refused(
    store: PosixStore, places: Any, error: type[TierStoreError]
) -> None:
    store.close()
    path = store.path / "zarr.json"
    about = json.loads(path.read_text())
    about["attributes"]["tierstore"]["optimizers"][0]["places"] = places
    path.write_text(json.dumps(about))
    with pytest.raises(error):
        make_store(store.config.directories).open(store.path)


# -------------------------------------------------------------------------- failures and leftovers


@pytest.mark.parametrize("letter", "abc")
@pytest.mark.parametrize("function", ["make_directory", "allocate_file", "sync_directory"])
def test_a_failure_in_one_directory_leaves_nothing_in_any(
    tmp_path: Path, letter: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in named(tmp_path):
        directory.mkdir()
    real = getattr(_direct_io, function)

    def failing(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.is_relative_to(tmp_path / letter / "train-0badcafe/rank-00000"):
            raise CapacityError(errno.ENOSPC, "this drive was told to be full")
        return real(path, *arguments, **options)

    monkeypatch.setattr(_direct_io, function, failing)
    with pytest.raises(CapacityError, match="told to be full"):
        allocate(make_store(named(tmp_path)))
    assert [path for directory in named(tmp_path) for path in directory.iterdir()] == []


def test_what_was_there_before_is_never_touched(store: PosixStore, tmp_path: Path) -> None:
    """The same run's name with another first directory, and the same further one."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StateError, match=f"{tmp_path}/b/.*exists already"):
        allocate(make_store([tmp_path / "d", tmp_path / "b"]))
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "d"])
    assert holds(store, 1)
    other = tmp_path / "e/train-0badcafe"
    zarr.create_group(other, attributes={"mine": "precious"})
    with pytest.raises(StateError, match="something else's"):
        allocate(make_store([tmp_path / "d", tmp_path / "e"]))
    assert [path.name for path in other.iterdir()] == ["zarr.json"]


def test_ranks_share_directories_in_any_order(tmp_path: Path) -> None:
    stores = []
    for rank, letters in enumerate(("ab", "ba", "cb")):
        config = TierConfig(tier="nvme", directories=named(tmp_path, letters))
        store = PosixStore(config, CpuDevice(), Identity(nonce="0badcafe", rank=rank))
        allocate(store)
        write_generation(store, rank + 1)
        stores.append(store)
    assert all(holds(store, store.identity.rank + 1) for store in stores)
    for store in stores:
        store.close(discard=True)
    assert [path for directory in named(tmp_path) for path in directory.iterdir()] == []


@pytest.mark.parametrize("committed", [False, True])
def test_discarding_removes_everything(tmp_path: Path, committed: bool) -> None:
    store = make_store(named(tmp_path))
    allocate(store)
    write_generation(store, 1, commit=committed)
    store.close(discard=committed)
    assert [path for directory in named(tmp_path) for path in directory.iterdir()] == []


def test_stores_of_other_runs_are_named_once(
    store: PosixStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tierstore")
    config = TierConfig(tier="nvme", directories=named(tmp_path, "bc"), role="critic")
    with PosixStore(config, CpuDevice(), Identity(nonce="1234")) as other:
        allocate(other)
    assert "1 stores of other runs" in caplog.text
    assert "(train-0badcafe)" in caplog.text


def test_a_snapshot_is_one_plain_tree(store: PosixStore, tmp_path: Path) -> None:
    store.snapshot(tmp_path / "kept")
    write_generation(store, 2)
    store.close(discard=True)
    for directory in named(tmp_path):
        shutil.rmtree(directory)
    assert not [path for path in (tmp_path / "kept").rglob("c/*") if path.is_symlink()]
    with make_store([tmp_path], recovery="none") as kept:
        kept.open(tmp_path / "kept/rank-00000")
        assert kept.committed is not None
        assert kept.committed.step == 1
        assert holds(kept, 1)


def test_a_directory_without_direct_io_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = named(tmp_path, "ab")
    monkeypatch.setattr(
        _direct_io, "direct_io_refused", lambda path: "" if path == a else "no O_DIRECT"
    )
    with make_store([a, b]) as store:
        allocate(store)
        assert store.mode == "buffered"
        write_generation(store, 1)
        assert holds(store, 1)
    assert f"no O_DIRECT in {b}" in caplog.text


def test_relative_directories_survive_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with make_store([Path("a"), Path("b")]) as store:
        allocate(store)
        os.chdir("/")
        write_generation(store, 1)
        assert holds(store, 1)
        link = next(path for path in store.path.rglob("c/*") if path.is_symlink())
        assert link.is_file()
