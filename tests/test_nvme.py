"""The nvme tier: the conformance suite, and what is its own."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, settings

from tierstore.backends import _direct_io, _placement
from tierstore.backends.posix import PosixStore
from tierstore.config import TierConfig
from tierstore.device import CpuDevice
from tierstore.errors import (
    CapacityError,
    ConfigError,
    CorruptError,
    LayoutError,
    StateError,
    TransferError,
)
from tierstore.layout import StateLayout
from tierstore.records import ArrayKey, Identity
from tierstore.testing.conformance import (
    TierStoreTests,
    make_optimizer,
    read_array,
    tile_values,
    write_generation,
)
from tierstore.testing.stateful import store_machine


class TestNvme(TierStoreTests):
    store_class = PosixStore


TestNvmeModel = store_machine(PosixStore).TestCase
TestNvmeModel.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PosixStore]:
    made = make_store(tmp_path)
    made.allocate([make_optimizer()])
    write_generation(made, 1)
    yield made
    made.close()


def make_store(directory: Path, **options: Any) -> PosixStore:
    config = TierConfig(tier="nvme", directories=(directory,), slots=2, **options)
    return PosixStore(config, CpuDevice(), Identity(nonce="0badcafe"))


def chunk_file(store: PosixStore, array: str = "exp_avg", chunk: int = 0) -> Path:
    return store.path / "gen-a" / "opt-0" / array / "c" / str(chunk)


def test_plain_zarr_reads_every_number_and_the_tree(store: PosixStore) -> None:
    root = zarr.open_group(store.path.parent, mode="r")
    layout = store.optimizers["opt-0"].layout
    for key in store.optimizers["opt-0"].keys():
        array = root[f"rank-00000/gen-a/{key}"]
        assert isinstance(array, zarr.Array)
        assert (array.chunks, array.shards) == ((1024,), (3072,))
        wanted = torch.cat(read_array(store, key))[: layout.numel].numpy()
        assert np.asarray(array[:]).tobytes() == wanted.tobytes()
    assert root.attrs["tierstore"] == {"format": 1, "role": "train", "nonce": "0badcafe"}
    rank = json.loads((store.path / "zarr.json").read_text())["attributes"]["tierstore"]
    assert StateLayout.from_json(rank["optimizers"][0]["layout"]) == layout


def test_files_are_of_the_owner_only_and_preallocated(store: PosixStore) -> None:
    for path in store.path.parent.rglob("*"):
        if path.is_symlink():
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    for generation in ("gen-a", "gen-b"):
        for path in (store.path / generation).rglob("c/*"):
            assert path.stat().st_blocks * 512 >= path.stat().st_size > 0


@pytest.mark.parametrize("place", ["element", "checksum"])
def test_a_flipped_bit_is_refused_by_us_and_by_zarr(store: PosixStore, place: str) -> None:
    form = store.optimizers["opt-0"].formats["exp_avg"]
    offset = form.tile_offset(1) + (17 if place == "element" else form.tile_nbytes + 2)
    with chunk_file(store).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(CorruptError, match=r"tile 1 of opt-0/exp_avg .*checksum"):
        read_array(store, ArrayKey("opt-0", "exp_avg"))
    array = zarr.open_array(store.path / "gen-a/opt-0/exp_avg", mode="r")
    assert array[0] == array[0] or np.isnan(array[0])  # the tile next to it is fine
    with pytest.raises(ValueError, match="checksum"):
        array[1024]


def test_a_lost_chunk_reads_as_nan_in_zarr_and_is_an_error_here(store: PosixStore) -> None:
    chunk_file(store, chunk=1).unlink()
    array = zarr.open_array(store.path / "gen-a/opt-0/exp_avg", mode="r")
    assert np.isnan(np.asarray(array[3072:6144])).all()
    with pytest.raises(TransferError, match="No such file"):
        read_array(store, ArrayKey("opt-0", "exp_avg"))
    path = store.path
    store.close()
    with pytest.raises(CorruptError, match="1 chunk files of step 1 are missing"):
        make_store(path.parents[1]).open(path)


def test_a_truncated_chunk_is_an_error_that_says_where(store: PosixStore) -> None:
    os.truncate(chunk_file(store), 8192)
    with pytest.raises(CorruptError, match="ends at byte 8192"):
        read_array(store, ArrayKey("opt-0", "exp_avg"))


def test_what_was_never_committed_is_not_left_behind(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        store.allocate([make_optimizer()])
        write_generation(store, 1, commit=False)
    assert list(tmp_path.iterdir()) == []


def test_stores_of_other_runs_are_reported_and_left_alone(
    tmp_path: Path, small_tmpfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for directory in (tmp_path / "stores", small_tmpfs):
        with make_store(directory) as store:
            store.allocate([make_optimizer(numel=3000)])
            write_generation(store, 1)
    caplog.set_level("INFO", logger="tierstore")
    config = TierConfig(tier="nvme", directories=(tmp_path / "stores",), role="critic")
    with PosixStore(config, CpuDevice(), Identity(nonce="1234")) as other:
        other.allocate([make_optimizer()])
    assert "1 stores of other runs" in caplog.text
    assert "train-0badcafe" in caplog.text
    assert (tmp_path / "stores" / "train-0badcafe" / "rank-00000").is_dir()
    config = TierConfig(tier="nvme", directories=(small_tmpfs,))
    with (
        PosixStore(config, CpuDevice(), Identity(nonce="1234")) as other,
        pytest.raises(CapacityError, match=r"1 other runs \(train-0badcafe\)"),
    ):
        other.allocate([make_optimizer(numel=100_000)])


def test_discarding_removes_a_new_store_and_never_an_opened_one(tmp_path: Path) -> None:
    for discard in (False, True):
        store = make_store(tmp_path)
        store.allocate([make_optimizer()]) if not store.path.exists() else store.open(store.path)
        if store.committed is None:
            write_generation(store, 1)
        store.close(discard=discard)
        assert store.path.exists()
    other = make_store(tmp_path / "other")
    other.allocate([make_optimizer()])
    write_generation(other, 1)
    other.close(discard=True)
    assert not other.path.exists()


def test_a_tile_never_written_is_refused_by_zarr(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        store.allocate([make_optimizer()])
        array = zarr.open_array(store.path / "gen-a/opt-0/main", mode="r")
        with pytest.raises(ValueError, match="checksum"):
            array[0]


def test_a_file_system_without_direct_io_is_said_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "the file system refuses O_DIRECT (Invalid argument)"
    monkeypatch.setattr(_direct_io, "direct_io_refused", lambda directory: reason)
    with make_store(tmp_path) as store:
        assert store.probe(store.config, store.device).mode == "buffered"
        store.allocate([make_optimizer()])
        assert store.mode == "buffered"
        write_generation(store, 3)
        assert _same(store, 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert reason in caplog.text


def _same(store: PosixStore, seed: int) -> bool:
    return all(
        torch.equal(
            torch.cat(read_array(store, key)).view(torch.uint8),
            torch.cat(
                [tile_values(entry, key, tile, seed) for tile in range(entry.layout.n_tiles)]
            ).view(torch.uint8),
        )
        for entry in store.optimizers.values()
        for key in entry.keys()
    )


def test_directory_that_cannot_be_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    store = make_store(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match="can't run"):
        store.allocate([make_optimizer()])
    with pytest.raises(ConfigError, match="--optimizer-state-dir"):
        PosixStore(TierConfig(tier="nvme"), CpuDevice(), Identity(nonce="x"))


@pytest.mark.parametrize("sets", [2, 3, 5, 100])
def test_host_memory_stays_within_the_cap(tmp_path: Path, sets: int) -> None:
    set_nbytes = 3 * (4096 + 4096)
    with make_store(tmp_path, host_memory_nbytes=sets * set_nbytes) as store:
        store.allocate([make_optimizer()])
        assert store.host_nbytes <= sets * set_nbytes
        assert (store.read_sets, store.write_sets) == (min(2, sets // 2), min(2, sets - sets // 2))
        write_generation(store, 2)
        assert _same(store, 2)


def test_a_cap_below_the_minimum_is_refused_with_the_number(tmp_path: Path) -> None:
    store = make_store(tmp_path, host_memory_nbytes=2 * 3 * 8192 - 1)
    with pytest.raises(ConfigError, match="at least 49,152"):
        store.allocate([make_optimizer()])
    assert not store.path.exists()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_file_system_is_found_before_the_first_step(small_tmpfs: Path) -> None:
    store = make_store(small_tmpfs)
    with pytest.raises(CapacityError, match="recovery=none") as caught:
        store.allocate([make_optimizer(numel=100_000)])
    assert caught.value.errno == errno.ENOSPC
    assert list(small_tmpfs.iterdir()) == []


def test_space_that_somebody_else_takes_meanwhile(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_placement, "require_space", lambda *_: None)
    store = make_store(small_tmpfs)
    with pytest.raises(CapacityError, match="reserving"):
        store.allocate([make_optimizer(numel=100_000)])
    assert not store.path.exists()


def test_a_kill_in_mid_step_leaves_the_last_step_whole(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_nvme import make_optimizer, make_store, write_generation
store = make_store(Path(sys.argv[1]))
store.allocate([make_optimizer()])
write_generation(store, 1)
write_generation(store, 2)
write_generation(store, 3, commit=False)
os.kill(os.getpid(), signal.SIGKILL)
"""
    here = str(Path(__file__).parent)
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path), here], check=False)
    assert ended.returncode == -signal.SIGKILL
    with make_store(tmp_path) as store:
        store.open(store.path)
        assert store.committed is not None
        assert store.committed.step == 2
        assert _same(store, 2)
        write_generation(store, 3)
        assert _same(store, 3)


@pytest.mark.parametrize("when", ["record", "commit", "renamed"])
def test_a_commit_that_fails_half_way(
    store: PosixStore, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _direct_io.write_json

    def failing(path: Path, value: Any) -> None:
        here = (path.parent.name == "COMMIT") == (when != "record")
        if here and when == "renamed":
            real(path, value)
        if here:
            raise TransferError(errno.EIO, "this drive was told to fail")
        real(path, value)

    write_generation(store, 2, commit=False)
    monkeypatch.setattr(_direct_io, "write_json", failing)
    with pytest.raises(TransferError, match="told to fail"):
        store.commit(2, {})
    monkeypatch.undo()
    store.rollback()
    assert _same(store, 1)
    store.begin()  # from here on the generation that failed is being overwritten
    path = store.path
    store.close()
    with make_store(path.parents[1]) as again:
        again.open(path)
        assert again.committed is not None
        assert again.committed.step == 1
        assert _same(again, 1)


def test_without_recovery_a_step_cut_short_is_never_opened(tmp_path: Path) -> None:
    with make_store(tmp_path, recovery="none") as store:
        store.allocate([make_optimizer()])
        assert not (store.path / "gen-b").exists()
        write_generation(store, 1)
        write_generation(store, 2, commit=False)
    with pytest.raises(CorruptError, match="stopped in mid-step"):
        make_store(tmp_path, recovery="none").open(store.path)


def test_a_forked_child_does_not_keep_the_store_in_use(store: PosixStore) -> None:
    path = store.path
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, and that the store has threads is the point here.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    store.close()
    with make_store(path.parents[1]) as again:
        again.open(path)
    os.write(writer, b"x")
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)


def test_a_link_that_can_not_be_made_is_no_error(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(target: str, path: Path) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "symlink", full)
    write_generation(store, 2)
    assert store.committed is not None
    assert store.committed.step == 2
    assert _same(store, 2)


def test_a_snapshot_never_touches_what_is_something_else_s(
    store: PosixStore, tmp_path: Path
) -> None:
    foreign = tmp_path / "mine"
    zarr.create_group(foreign, attributes={"mine": "precious"})
    before = (foreign / "zarr.json").read_bytes()
    with pytest.raises(StateError, match="something else's"):
        store.snapshot(foreign)
    assert (foreign / "zarr.json").read_bytes() == before
    assert [path.name for path in foreign.iterdir()] == ["zarr.json"]
    (tmp_path / "file").touch()
    with pytest.raises(TransferError):
        store.snapshot(tmp_path / "file")


def test_a_refused_write_does_not_count_as_written(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        store.allocate([make_optimizer()])
        store.begin()
        store._blocks._free.clear()
        key = ArrayKey("opt-0", "main")
        with pytest.raises(StateError, match="at once"):
            store.write(key, 0, torch.zeros(1024))
        assert 0 in store._unwritten[key]


def test_a_failed_write_nobody_waits_for_still_fails_the_commit(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise TransferError(errno.EIO, "this drive was told to fail")

    monkeypatch.setattr(store, "_save", fail)
    store.begin()
    entry = store.optimizers["opt-0"]
    for tile in range(entry.layout.n_tiles):
        writes = [store.write(key, tile, tile_values(entry, key, tile, 2)) for key in entry.keys()]
        for write in writes:
            write.settled.exception(timeout=60)
    with pytest.raises(TransferError, match="told to fail"):
        store.commit(2, {})
    monkeypatch.undo()
    store.rollback()
    write_generation(store, 3)
    assert _same(store, 3)


def test_any_error_of_a_write_lets_the_store_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path)
    store.allocate([make_optimizer()])

    def fail(*_: Any) -> None:
        raise MemoryError("no memory to write with")

    monkeypatch.setattr(store, "_save", fail)
    store.begin()
    store.write(ArrayKey("opt-0", "main"), 0, torch.zeros(1024))
    with pytest.raises(MemoryError):
        store.close()
    store.close()
    assert not store.path.exists()


def test_a_forked_child_that_closes_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.allocate([make_optimizer()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        store.close(discard=True)
        os._exit(0)
    os.waitpid(child, 0)
    write_generation(store, 1)
    assert _same(store, 1)
    store.close()


def fill(path: Path) -> None:
    """Take all space that is left."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    with contextlib.suppress(OSError):
        while True:
            os.write(descriptor, b"x" * 4096)
    os.close(descriptor)


def test_a_full_file_system_does_not_make_an_opened_store_slow(small_tmpfs: Path) -> None:
    with make_store(small_tmpfs) as store:
        store.allocate([make_optimizer(numel=3000)])
        mode = store.mode
        write_generation(store, 1)
    (small_tmpfs / "filler").write_bytes(b"x" * (256 * 1024))
    fill(small_tmpfs / "rest")
    with make_store(small_tmpfs) as again:
        again.open(store.path)
        assert again.mode == mode


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "a b", ".hidden", "x" * 65])
def test_names_that_are_no_directory_s_are_refused(name: str) -> None:
    with pytest.raises(LayoutError, match="name of a directory"):
        make_optimizer(name)
    with pytest.raises(LayoutError, match="name of a directory"):
        make_optimizer(arrays={name: "float32"})
