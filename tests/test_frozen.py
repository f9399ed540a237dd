"""Frozen generations: bits that stay, space that is there, crashes and errors at every point."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.backends import _direct_io, _placement
from tierstore.backends._spares import Kind
from tierstore.backends.posix import PosixStore
from tierstore.config import TierConfig
from tierstore.device import CpuDevice
from tierstore.errors import CapacityError, CorruptError, StateError, TransferError
from tierstore.records import ArrayKey, Identity
from tierstore.store import TierStore
from tierstore.testing.conformance import (
    make_optimizer,
    read_array,
    tile_values,
    write_generation,
)
from tierstore.zarr_format import checksum

GENERATIONS = ("gen-a", "gen-b")
# What changes anything on the drive, or makes it last.
CHANGES = (
    "allocate_file",
    "link_file",
    "make_directory",
    "move_file",
    "remove_file",
    "replace_link",
    "sync_data",
    "sync_directory",
    "write_full",
    "write_json",
)


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_placement, "measure", lambda directories: [1e9] * len(directories))


def make_store(*directories: Path, **options: Any) -> PosixStore:
    # One thread, so that what happens has one order.
    config = TierConfig(tier="nvme", directories=directories, slots=2, io_threads=1, **options)
    return PosixStore(config, CpuDevice(), Identity(nonce="0badcafe"))


def allocated(*directories: Path, numel: int = 5000, **options: Any) -> PosixStore:
    store = make_store(*directories, **options)
    store.allocate([make_optimizer(numel=numel)])
    return store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PosixStore]:
    with allocated(tmp_path) as made:
        write_generation(made, 1)
        write_generation(made, 2)
        yield made


def chunk_files(store: PosixStore, *generations: str) -> list[Path]:
    return [chunk.path for generation in generations for chunk in store._tree.chunks(generation)]


def links(path: Path) -> int:
    return path.lstat().st_nlink


def spares(store: PosixStore) -> list[Path]:
    return [
        path
        for top in store._tree.paths
        for path in sorted(top.glob("spare/*"))
        if path.name != "zarr.json"
    ]


def holds(store: PosixStore, seed: int) -> bool:
    return all(
        found.view(torch.uint8).equal(tile_values(entry, key, tile, seed).view(torch.uint8))
        for entry in store.optimizers.values()
        for key in entry.keys()
        for tile, found in enumerate(read_array(store, key))
    )


def expect_frozen(store: TierStore, name: str, seed: int) -> None:
    """The files, read without any help."""
    files = {str(path): source for path, source, _ in store.frozen_files(name)}
    for entry in store.optimizers.values():
        for key in entry.keys():
            form = entry.formats[key.name]
            for chunk in range(entry.layout.n_chunks):
                data = files[f"{key}/c/{chunk}"].read_bytes()
                n_tiles = entry.layout.tiles_in_chunk(chunk)
                assert data[: form.header_nbytes] == form.header(n_tiles)
                for place in range(n_tiles):
                    tile = chunk * entry.layout.tiles_per_chunk + place
                    bits = tile_values(entry, key, tile, seed).view(torch.uint8).numpy().tobytes()
                    start = form.tile_offset(place)
                    assert data[start : start + len(bits) + 4] == bits + checksum(bits)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Let nothing write a file that has several names."""
    real = _direct_io.open_file

    @contextlib.contextmanager
    def open_file(path: Path, *, write: bool = False, direct: bool = False) -> Iterator[int]:
        with real(path, write=write, direct=direct) as descriptor:
            assert not write or os.fstat(descriptor).st_nlink == 1, path
            yield descriptor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_direct_io, "open_file", open_file)
        yield


@contextlib.contextmanager
def nothing_is_made() -> Iterator[None]:
    """Let no file be allocated."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a step had to find space")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_direct_io, "allocate_file", refuse)
        yield


def step(store: PosixStore, seed: int) -> None:
    with guarded(), nothing_is_made():
        write_generation(store, seed)


@contextlib.contextmanager
def before_each_change(what: Callable[[str, Path, int], None]) -> Iterator[None]:
    """Call `what` with name, path and number before everything that changes the drive."""
    count, lock = 0, threading.RLock()

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            path = next(item for item in arguments if isinstance(item, Path))
            with lock:  # some are made by several threads
                number, count = count, count + 1
                what(name, path, number)
            return real(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(_direct_io, name, noted(name, getattr(_direct_io, name)))
        yield


def changes(work: Callable[[], object]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    with before_each_change(lambda name, path, number: found.append((name, path))):
        work()
    return found


# --------------------------------------------------------------------------- files, links, spares


def test_no_byte_is_copied(store: PosixStore) -> None:
    store.freeze("kept")
    frozen = store.path / "frozen/kept"
    for file in chunk_files(store, "gen-b"):
        assert file.samefile(frozen / file.relative_to(store.path / "gen-b"))
        assert links(file) == 2
    metadata = [*store.path.rglob("zarr.json")]
    assert len(metadata) > 10
    assert {links(path) for path in metadata} == {1}
    for path in [*store.path.glob("frozen/**/*"), *store.path.glob("spare/**/*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    for path in spares(store):
        assert path.stat().st_blocks * 512 >= path.stat().st_size > 0


def test_zarr_walks_the_whole_tree(store: PosixStore) -> None:
    store.freeze("kept")
    rank = zarr.open_group(store.path, mode="r")  # a warning is an error here
    members: dict[str, Any] = dict(rank.members(max_depth=None))
    assert {"gen-b/opt-0/main", "frozen/kept/opt-0/main", "spare"} < set(members)
    assert members["frozen/kept"].attrs["tierstore"]["step"] == 2
    assert store.frozen()["kept"] == store.committed


def test_a_generation_has_spares_as_long_as_it_is_linked(store: PosixStore) -> None:
    assert not (store.path / "spare").exists()
    n_files = len(chunk_files(store, "gen-a"))
    store.freeze("two")
    assert len(spares(store)) == n_files
    store.freeze("two-again")
    assert len(spares(store)) == n_files
    step(store, 3)
    store.freeze("three")
    assert len(spares(store)) == 2 * n_files
    step(store, 4)
    assert len(spares(store)) == n_files
    step(store, 5)
    assert spares(store) == []
    for name, seed in {"two": 2, "two-again": 2, "three": 3}.items():
        expect_frozen(store, name, seed)


def test_released_files_are_used_again(store: PosixStore) -> None:
    store.freeze("two")
    step(store, 3)
    step(store, 4)
    inodes = {path.stat().st_ino for path in store.path.glob("frozen/two/*/*/c/*")}
    store.release("two")
    assert {path.stat().st_ino for path in spares(store)} == inodes
    with nothing_is_made():
        store.freeze("four")
    step(store, 5)
    step(store, 6)
    assert {path.stat().st_ino for path in chunk_files(store, "gen-b")} == inodes
    expect_frozen(store, "four", 4)
    assert holds(store, 6)


def test_what_is_not_needed_is_removed(store: PosixStore) -> None:
    n_files = len(chunk_files(store, "gen-a"))
    store.freeze("two")
    step(store, 3)
    store.freeze("three")
    assert len(spares(store)) == 2 * n_files
    store.release("two")
    store.release("three")
    assert len(spares(store)) == n_files  # for the next time
    assert not (store.path / "frozen").exists()
    step(store, 4)
    assert len(spares(store)) == n_files


def test_files_of_one_length_and_other_headers_do_not_mix(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        store.allocate(
            [
                make_optimizer("opt-0", 3 * 3072, tile_numel=1024, chunk_numel=3072),
                make_optimizer("opt-1", 2 * 4096, tile_numel=2048, chunk_numel=4096),
            ]
        )
        sizes = {path.stat().st_size for path in chunk_files(store, "gen-a")}
        kinds = {Kind.of(chunk) for chunk in store._tree.chunks("gen-a")}
        assert (len(sizes), len(kinds)) == (1, 2)
        for seed in range(1, 7):
            write_generation(store, seed)
            store.freeze(f"step-{seed}")
            if seed > 3:
                store.release(f"step-{seed - 3}")
        path = store.path
        store.close()
        with make_store(tmp_path) as again:
            again.open(path)
            step(again, 7)
            step(again, 8)
            for seed in (4, 5, 6):
                expect_frozen(again, f"step-{seed}", seed)
            assert holds(again, 8)


def test_what_can_not_be_a_spare_is_removed_when_the_store_is_opened(store: PosixStore) -> None:
    store.freeze("kept")
    path, pool = store.path, store.path / "spare"
    store.close()
    good = spares(store)
    shutil.copy(good[0], pool / "no-header")
    with (pool / "no-header").open("r+b") as file:
        file.write(b"\0" * 4096)
    shutil.copy(good[0], pool / "short")
    os.truncate(pool / "short", 8192)
    os.link(good[0], path.parent / "mine")
    (pool / ".zarr.json.12345678").touch()
    (pool / "somebody-s").mkdir()
    with make_store(path.parents[1]) as again:
        again.open(path)
        assert spares(again) == sorted([*good[1:], pool / "somebody-s"])
        write_generation(again, 3)
        write_generation(again, 4)  # one spare has gone, and is made
        expect_frozen(again, "kept", 2)


def test_spares_that_somebody_took_are_made_again(store: PosixStore) -> None:
    store.freeze("kept")
    taken, linked, *_ = spares(store)
    taken.unlink()
    os.link(linked, store.path.parent / "mine")
    before = linked.read_bytes()
    with guarded():
        write_generation(store, 3)
        write_generation(store, 4)
    expect_frozen(store, "kept", 2)
    assert (store.path.parent / "mine").read_bytes() == before


# ---------------------------------------------------------------------------- links from elsewhere


def test_links_that_somebody_made_are_respected(store: PosixStore, tmp_path: Path) -> None:
    file = chunk_files(store, "gen-a")[0]
    os.link(file, tmp_path / "mine")
    before = file.read_bytes()
    with guarded():
        write_generation(store, 3)
    assert (tmp_path / "mine").read_bytes() == before
    assert links(tmp_path / "mine") == links(file) == 1
    assert holds(store, 3)


def test_a_file_that_somebody_linked_is_not_made_a_spare(store: PosixStore, tmp_path: Path) -> None:
    store.freeze("kept")
    step(store, 3)
    step(store, 4)
    file = next(store.path.glob("frozen/kept/*/*/c/*"))
    os.link(file, tmp_path / "mine")
    before = file.read_bytes()
    store.release("kept")
    for seed in (5, 6, 7):
        with guarded():
            write_generation(store, seed)
            store.freeze(f"{seed}")
    assert (tmp_path / "mine").read_bytes() == before


def test_without_recovery_links_are_refused(tmp_path: Path) -> None:
    with allocated(tmp_path, recovery="none") as store:
        write_generation(store, 1)
        with pytest.raises(StateError, match=r"recovery=step.*snapshot"):
            store.freeze("a")
        assert not (store.path / "frozen").exists()
        os.link(chunk_files(store, "gen-a")[0], tmp_path / "mine")
        with pytest.raises(StateError, match=r"have a second name, such as .*gen-a"):
            store.begin()
        assert holds(store, 1)
        (tmp_path / "mine").unlink()
        write_generation(store, 2)
        assert holds(store, 2)


def test_what_is_frozen_is_safe_from_a_run_without_recovery(store: PosixStore) -> None:
    store.freeze("kept")
    path = store.path
    store.close()
    with make_store(path.parents[1], recovery="none") as again:
        again.open(path)
        with pytest.raises(StateError, match="Release what is frozen"):
            again.begin()
        expect_frozen(again, "kept", 2)
        again.release("kept")
        step(again, 3)
        assert holds(again, 3)


# --------------------------------------------------------------------------------- the right order


def test_a_frozen_generation_counts_when_all_of_it_is_on_the_drive(store: PosixStore) -> None:
    found = changes(lambda: store.freeze("kept"))
    last = found.index(("write_json", store.path / "frozen/kept/zarr.json"))
    assert {path.parent for _, path in found[last + 2 :]} == {store.path / "frozen"}
    names = {path: number for number, (name, path) in enumerate(found) if name == "sync_directory"}
    for number, (name, path) in enumerate(found):
        if name == "link_file":
            target = store.path / "frozen/kept" / path.relative_to(store.path / "gen-b")
            assert number < names[target.parent]
        if name in ("allocate_file", "link_file", "sync_data"):
            assert number < last


def test_a_generation_is_marked_before_its_files_are_replaced(store: PosixStore) -> None:
    store.freeze("kept")
    step(store, 3)
    found = changes(store.begin)
    assert found[0] == ("write_json", store.path / "gen-b/zarr.json")
    moved = [number for number, (name, _) in enumerate(found) if name == "move_file"]
    assert len(moved) == len(chunk_files(store, "gen-b"))
    synced = {path for name, path in found[max(moved) :] if name == "sync_directory"}
    assert synced == {path.parent for path in chunk_files(store, "gen-b")}


def test_the_record_is_gone_before_a_file_is_used_again(store: PosixStore) -> None:
    store.freeze("kept")
    step(store, 3)
    step(store, 4)
    found = changes(lambda: store.release("kept"))
    top = store.path / "frozen/kept"
    assert found[:2] == [("remove_file", top / "zarr.json"), ("sync_directory", top)]
    assert "move_file" in {name for name, _ in found[2:]}


# -------------------------------------------------------------------------------- crashes anywhere


def images(work: Callable[[], object], tops: Sequence[Path], to: Path) -> Iterator[list[Path]]:
    """Copies, links kept, of what a process leaves that is killed at any point of some work."""
    places: list[list[Path]] = []

    def copy(name: str, path: Path, number: int) -> None:
        place = [to / f"{len(places)}" / top.name for top in tops]
        for top, copied in zip(tops, place, strict=True):
            copied.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", str(top), str(copied)], check=True)
        places.append(place)

    with before_each_change(copy):
        work()
    copy("", Path(), 0)
    yield from places


def expect_whole(tops: Sequence[Path], steps: set[int], frozen: dict[str, int]) -> set[str]:
    """Open what is left, and go on from there; returns the names of what is frozen."""
    with make_store(*tops) as store:
        store.open(store.path)
        assert store.committed is not None
        assert store.committed.step in steps
        assert holds(store, store.committed.step)
        names = set(store.frozen())
        for top in store._tree.paths:
            assert {path.name for path in top.glob("frozen/*") if path.is_dir()} == names
        for seed in (11, 12, 13):
            step(store, seed)
            assert holds(store, seed)
            for name in names:
                expect_frozen(store, name, frozen[name])
        store.freeze("new")
        for name in names:
            store.release(name)
        step(store, 14)
        step(store, 15)
        expect_frozen(store, "new", 13)
        return names


@pytest.mark.parametrize("letters", ["a", "abc"])
def test_killed_at_any_point_of_freezing(tmp_path: Path, letters: str) -> None:
    tops = [tmp_path / letter for letter in letters]
    with allocated(*tops) as store:
        write_generation(store, 1)
        write_generation(store, 2)
        store.freeze("two")
        step(store, 3)
        found = [
            expect_whole(left, {3}, {"two": 2, "three": 3})
            for left in images(lambda: store.freeze("three"), tops, tmp_path / "left")
        ]
    assert all("two" in names for names in found)
    whole = ["three" in names for names in found]
    assert whole == sorted(whole)
    assert (whole[0], whole[-1]) == (False, True)


@pytest.mark.parametrize("letters", ["a", "abc"])
def test_killed_at_any_point_of_the_next_step(tmp_path: Path, letters: str) -> None:
    tops = [tmp_path / letter for letter in letters]
    with allocated(*tops, numel=4000) as store:
        write_generation(store, 1)
        store.freeze("one")
        write_generation(store, 2)
        store.freeze("two")
        for left in images(store.begin, tops, tmp_path / "left"):
            assert expect_whole(left, {2}, {"one": 1, "two": 2}) == {"one", "two"}


@pytest.mark.parametrize("letters", ["a", "abc"])
@pytest.mark.parametrize("later_steps", [0, 1, 2])
def test_killed_at_any_point_of_releasing(tmp_path: Path, letters: str, later_steps: int) -> None:
    tops = [tmp_path / letter for letter in letters]
    with allocated(*tops, numel=4000) as store:
        write_generation(store, 1)
        store.freeze("one")
        store.freeze("same")
        write_generation(store, 2)
        store.freeze("two")
        for seed in range(3, 3 + later_steps):
            step(store, seed)
        committed = {2 + later_steps}
        store.release("same")
        frozen = {"one": 1, "two": 2}
        found = [
            expect_whole(left, committed, frozen)
            for left in images(lambda: store.release("one"), tops, tmp_path / "left")
        ]
    assert found[0] == {"one", "two"}
    assert found[-1] == {"two"}


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.test_frozen import allocated, before_each_change, write_generation
store = allocated(Path(sys.argv[1]))
write_generation(store, 1)
store.freeze("one")
write_generation(store, 2)
def kill(name, path, number):
    if (name, str(number)) == (sys.argv[3], sys.argv[4]) or sys.argv[3:] == ["", str(number)]:
        os.kill(os.getpid(), signal.SIGKILL)
with before_each_change(kill):
    store.freeze("two") if sys.argv[2] == "freeze" else write_generation(store, 3)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("work", ["freeze", "step"])
@pytest.mark.parametrize("number", [2, 12, 30, 999])
def test_a_process_that_is_really_killed(tmp_path: Path, work: str, number: int) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), work, "", str(number)]
    here = Path(__file__).parents[1]
    ended = subprocess.run(command, cwd=here, check=False)
    assert ended.returncode == -signal.SIGKILL
    done = number == 999
    steps = {3} if done and work == "step" else {2}
    names = expect_whole([tmp_path], steps, {"one": 1, "two": 2})
    assert names == ({"one", "two"} if done and work == "freeze" else {"one"})


# --------------------------------------------------------------------------------- errors anywhere


@pytest.mark.parametrize("letters", ["a", "abc"])
def test_an_error_at_any_point_of_freezing_leaves_nothing(tmp_path: Path, letters: str) -> None:
    tops = [tmp_path / letter for letter in letters]
    with allocated(*tops, numel=4000) as store:
        write_generation(store, 1)
        write_generation(store, 2)
        store.freeze("two")
        write_generation(store, 3)
        before = sorted(path for top in tops for path in top.rglob("*"))

        failed_at = 0

        def fail(name: str, path: Path, number: int) -> None:
            if number == failed_at:
                raise TransferError(errno.EIO, "this drive was told to fail")

        while True:
            try:
                with before_each_change(fail):
                    store.freeze("three")
            except TransferError:
                assert sorted(path for top in tops for path in top.rglob("*")) == before
                assert list(store.frozen()) == ["two"]
                failed_at += 1
            else:
                break
        assert failed_at > 30
        step(store, 4)
        step(store, 5)
        expect_frozen(store, "two", 2)
        expect_frozen(store, "three", 3)


def test_a_step_that_fails_in_the_middle_of_replacing_can_be_tried_again(
    store: PosixStore,
) -> None:
    store.freeze("kept")
    step(store, 3)

    def fail(name: str, path: Path, number: int) -> None:
        if name == "move_file" and number == 4:
            raise TransferError(errno.EIO, "this drive was told to fail")

    with before_each_change(fail), pytest.raises(TransferError, match="told to fail"):
        store.begin()
    assert holds(store, 3)
    assert {links(path) for path in chunk_files(store, "gen-b")} == {1, 2}
    step(store, 4)
    step(store, 5)
    expect_frozen(store, "kept", 2)


@pytest.mark.parametrize(
    "code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.EIO]
)
def test_a_file_system_without_links_says_what_to_do(
    store: PosixStore, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(store.path.rglob("*"))

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(TransferError, match=os.strerror(code)) as caught:
        store.freeze("kept")
    assert caught.value.errno == code
    assert ("snapshot" in str(caught.value)) == (code != errno.EIO)
    assert sorted(store.path.rglob("*")) == before
    assert holds(store, 2)


def test_no_room_is_said_before_anything_is_reserved(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(store.path.rglob("*"))
    needed = sum(path.stat().st_size for path in chunk_files(store, "gen-a"))
    free = needed + 4 * 2**20 - 1  # a step makes small files as well
    monkeypatch.setattr(_placement, "free_nbytes", lambda path: free)
    with nothing_is_made(), pytest.raises(CapacityError, match=rf"{free:,} .*Release") as caught:
        store.freeze("kept")
    assert caught.value.errno == errno.ENOSPC
    assert sorted(store.path.rglob("*")) == before
    free += 1
    store.freeze("kept")


def test_a_full_file_system_can_be_freed_by_releasing(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.freeze("two")
    step(store, 3)
    step(store, 4)

    def full(*_: Any, **__: Any) -> None:
        raise CapacityError(errno.ENOSPC, "this drive was told to be full")

    for name in ("allocate_file", "make_directory", "move_file", "write_json", "link_file"):
        monkeypatch.setattr(_direct_io, name, full)
    store.release("two")
    monkeypatch.undo()
    assert not (store.path / "frozen").exists()
    assert spares(store) == []
    step(store, 5)


def test_space_that_runs_out_leaves_the_spares_that_were_there(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.freeze("two")
    step(store, 3)
    before = sorted(store.path.rglob("*"))
    real = _direct_io.allocate_file
    made: list[Path] = []

    def limited(path: Path, nbytes: int) -> None:
        if len(made) == 3:
            raise CapacityError(errno.ENOSPC, "this drive was told to be full")
        made.append(path)
        real(path, nbytes)

    monkeypatch.setattr(_direct_io, "allocate_file", limited)
    with pytest.raises(CapacityError, match="told to be full"):
        store.freeze("three")
    assert sorted(store.path.rglob("*")) == before
    monkeypatch.undo()
    step(store, 4)
    expect_frozen(store, "two", 2)


def test_a_damaged_frozen_generation_is_said_and_can_be_released(
    store: PosixStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.freeze("good")
    store.freeze("damaged")
    next((store.path / "frozen/damaged").rglob("c/*")).unlink()
    assert list(store.frozen()) == ["good"]
    assert "missing or have the wrong length" in caplog.text
    with pytest.raises(CorruptError, match="missing"):
        store.frozen_files("damaged")
    store.release("damaged")
    assert [path.name for path in store.path.glob("frozen/*/")] == ["good"]


# -------------------------------------------------------------------------------------- the rest


def test_each_drive_has_its_own(tmp_path: Path) -> None:
    tops = [tmp_path / letter for letter in "abc"]
    with allocated(*tops, numel=10_000) as store:
        write_generation(store, 1)
        store.freeze("kept")
        for place, top in enumerate(store._tree.paths):
            mine = [chunk for chunk in store._tree.chunks("gen-a") if chunk.place == place]
            assert len(mine) == len([path for path in spares(store) if path.parents[1] == top])
            for chunk in mine:
                file = Path("frozen/kept") / chunk.path.relative_to(top / "gen-a")
                assert links(top / file) == 2
                if place:
                    assert (store.path / file).readlink() == top / file
        step(store, 2)
        step(store, 3)
        array = zarr.open_array(store.path / "frozen/kept/opt-0/main", mode="r")
        entry = store.optimizers["opt-0"]
        key = ArrayKey("opt-0", "main")
        wanted = torch.cat([tile_values(entry, key, i, 1) for i in range(entry.layout.n_tiles)])
        assert np.asarray(array[:]).tobytes() == wanted[:10_000].numpy().tobytes()
        store.release("kept")
        assert not [path for top in store._tree.paths for path in top.glob("frozen")]
        store.freeze("again")
        store.close(discard=True)
    assert [path for top in tops for path in top.iterdir()] == []


def test_another_thread_may_release_in_the_middle_of_a_step(store: PosixStore) -> None:
    store.freeze("two")
    step(store, 3)
    store.freeze("three")
    store.begin()
    errors: list[BaseException] = []

    def release() -> None:
        try:
            store.release("two")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=release)
    thread.start()
    entry = store.optimizers["opt-0"]
    for tile in range(entry.layout.n_tiles):
        for key in entry.keys():
            store.write(key, tile, tile_values(entry, key, tile, 4)).settled.result(timeout=60)
    thread.join()
    assert errors == []
    store.commit(4, {})
    assert holds(store, 4)
    step(store, 5)
    expect_frozen(store, "three", 3)


def test_after_a_rollback_the_last_commit_is_frozen(store: PosixStore) -> None:
    store.freeze("two")
    step(store, 3)
    with guarded():
        write_generation(store, 4, commit=False)
    store.rollback()
    store.freeze("three")
    step(store, 4)
    step(store, 5)
    expect_frozen(store, "two", 2)
    expect_frozen(store, "three", 3)


def test_a_store_that_never_froze_has_nothing_of_it(store: PosixStore) -> None:
    step(store, 3)
    assert store.frozen() == {}
    assert {path.name for path in store.path.iterdir()} == {
        "COMMIT",
        "current",
        "gen-a",
        "gen-b",
        "zarr.json",
    }


# --------------------------------------------------------------------------------- any sequence


def expect_accounts(store: PosixStore, frozen: dict[str, int]) -> None:
    """No file more than is needed, and a spare of the right kind for each that is linked."""
    linked = Counter(
        Kind.of(chunk)
        for generation in GENERATIONS
        for chunk in store._tree.chunks(generation)
        if links(chunk.path) > 1
    )
    found = Counter(
        (place, path.stat().st_size)
        for place, top in enumerate(store._tree.paths)
        for path in spares(store)
        if path.parents[1] == top
    )
    assert store._kept._spares.count() >= linked
    sizes = {Kind.of(chunk): chunk.nbytes for chunk in store._tree.chunks("gen-a")}
    known: Counter[tuple[int, int]] = Counter()
    for kind, count in store._kept._spares.count().items():
        known[kind.place, sizes[kind]] += count
    assert +known == found
    n_files = len(chunk_files(store, "gen-a"))
    assert len(spares(store)) <= 2 * n_files
    assert set(store.frozen()) == set(frozen)
    tops = store._tree.paths
    files = [path for top in tops for path in top.rglob("c/*") if not path.is_symlink()]
    inodes = {path.stat().st_ino for path in files}
    current = {path.stat().st_ino for path in chunk_files(store, *GENERATIONS)}
    held = set(frozen.values())
    # A frozen step takes space of its own only when no generation holds it any more.
    assert len(inodes - current) <= n_files * len(held)
    assert len(current) == 2 * n_files


@settings(max_examples=60)
@given(
    actions=st.lists(
        st.sampled_from(["step", "step", "freeze", "freeze", "release", "reopen", "fail"]),
        min_size=4,
        max_size=16,
    ),
    letters=st.sampled_from(["a", "ab"]),
    data=st.data(),
)
def test_any_sequence(actions: Iterable[str], letters: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory, guarded(), contextlib.ExitStack() as stores:
        tops = [Path(directory, letter) for letter in letters]
        store = stores.enter_context(allocated(*tops, numel=4000))
        path, seed = store.path, 1
        write_generation(store, seed)
        committed = seed
        frozen: dict[str, int] = {}
        for action in actions:
            if action == "step":
                seed += 1
                step(store, seed)
                committed = seed
            elif action == "fail":
                seed += 1
                with nothing_is_made():
                    write_generation(store, seed, commit=False)
                store.rollback()
            elif action == "freeze":
                name = f"n-{len(frozen)}-{seed}"
                if name not in frozen:
                    store.freeze(name)
                    frozen[name] = committed
            elif action == "release" and frozen:
                name = data.draw(st.sampled_from(sorted(frozen)))
                store.release(name)
                del frozen[name]
            elif action == "reopen":
                store.close()
                store = stores.enter_context(make_store(*tops))
                store.open(path)
            expect_accounts(store, frozen)
            assert holds(store, committed)
            for name, wanted in frozen.items():
                expect_frozen(store, name, wanted)
        for name in list(frozen):
            store.release(name)
            del frozen[name]
            expect_accounts(store, frozen)
        assert len(spares(store)) <= len(chunk_files(store, "gen-a"))
