"""The gds tier: the conformance suite on a device, and without one over a kvikio made of preads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.test_stream import equal, everything, expected, make_state, numbered, step
from tierstore.backends import _direct_io, _gds_mode, gds
from tierstore.backends._device_checksum import (
    KERNEL,
    SEGMENT_NBYTES,
    ChecksumLane,
    DeviceChecksum,
    shift_table,
    word_tables,
)
from tierstore.backends.gds import GdsStore
from tierstore.backends.posix import PosixStore
from tierstore.config import TierConfig
from tierstore.device import CpuDevice, Device, open_device
from tierstore.errors import CapacityError, ConfigError, CorruptError, StateError, TransferError
from tierstore.records import ArrayKey, Identity
from tierstore.store import TierStore
from tierstore.testing.conformance import (
    TierStoreTests,
    make_optimizer,
    read_array,
    tile_values,
    write_generation,
)
from tierstore.testing.faults import delayed
from tierstore.testing.stateful import store_machine
from tierstore.transfer import Transfer
from tierstore.zarr_format import checksum

_MISSING = [name for name in ("kvikio", "cupy") if importlib.util.find_spec(name) is None]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_kvikio = pytest.mark.skipif(bool(_MISSING), reason=f"needs {' and '.join(_MISSING)}")


@pytest.mark.cuda
@needs_cuda
@needs_kvikio
class TestGds(TierStoreTests):
    store_class = GdsStore


# ----------------------------------------------------------------- a kvikio that runs anywhere


class StandIn(str):
    """``cpu`` to torch, and a CUDA device to whoever asks for its type."""

    __slots__ = ()
    type = "cuda"
    index = 0  # type: ignore[assignment]


class StandInDevice(CpuDevice):
    def __init__(self) -> None:
        self.torch_device: Any = StandIn("cpu")


class FakeFuture:
    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def get(self) -> int:
        return self._future.result(timeout=60)


class FakeKvikio:
    """What the tier uses of kvikio: settings of the process, and files moved by other threads.

    Attributes
    ----------
    settings
        The process's.
    moved
        ``read`` or ``write``, and the byte, of all that was asked for.
    broken
        Called in place of moving anything, if set.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {
            "compat_mode": "AUTO",
            "num_threads": 1,
            "task_size": 4 * 2**20,
            "gds_threshold": 2**20,
            "bounce_buffer_size": 16 * 2**20,
            "auto_direct_io_read": False,
            "auto_direct_io_write": True,
        }
        self.moved: list[tuple[str, int]] = []
        self.opened: list[Path] = []
        self.broken: Callable[[str], Any] | None = None
        self.pool = ThreadPoolExecutor(4, "kvikio")

    def module(self) -> ModuleType:
        made, defaults = ModuleType("kvikio"), ModuleType("kvikio.defaults")
        made.__dict__.update(
            CompatMode=SimpleNamespace(OFF="OFF", ON="ON", AUTO="AUTO"),
            CuFile=lambda path, flags: FakeFile(self, path, flags),
            defaults=defaults,
        )
        defaults.__dict__["set"] = self._set
        return made

    def _set(self, wanted: dict[str, Any]) -> Any:
        # Like kvikio's: set at once, put back at the end of the block.
        before = {name: self.settings[name] for name in wanted}
        self.settings.update(wanted)

        @contextlib.contextmanager
        def block() -> Iterator[None]:
            yield
            self.settings.update(before)

        return block()


class FakeFile:
    def __init__(self, fake: FakeKvikio, path: Path, flags: str) -> None:
        self._fake = fake
        self._descriptor = os.open(path, {"r": os.O_RDONLY, "r+": os.O_RDWR}[flags])
        fake.opened.append(Path(path))

    def __del__(self) -> None:
        os.close(self._descriptor)

    def pread(self, buf: torch.Tensor, size: int | None = None, file_offset: int = 0) -> Any:
        return self._move("read", os.preadv, buf, size, file_offset)

    def pwrite(self, buf: torch.Tensor, size: int | None = None, file_offset: int = 0) -> Any:
        return self._move("write", os.pwritev, buf, size, file_offset)

    def _move(
        self, what: str, move: Any, buf: torch.Tensor, size: int | None, file_offset: int
    ) -> Any:
        assert (buf.dtype, buf.dim(), size) == (torch.uint8, 1, None)
        self._fake.moved.append((what, file_offset))
        if self._fake.broken is not None:
            return self._fake.broken(what)
        data = buf.numpy().data
        return FakeFuture(self._fake.pool.submit(move, self._descriptor, [data], file_offset))


class FakeChecksum:
    """The same numbers by the processor."""

    def __init__(self, longest_nbytes: int, device_index: int) -> None:
        self._longest_nbytes = longest_nbytes

    def of(self, data: torch.Tensor, lane: Any) -> bytes:
        assert data.numel() <= self._longest_nbytes
        assert data.numel() % SEGMENT_NBYTES == 0
        with lane.alone:
            return checksum(data.numpy())


class FakeLane:
    """Used by one transfer at a time."""

    def __init__(self, device_index: int) -> None:
        self.alone = Alone()


class Alone:
    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        assert self._lock.acquire(blocking=False), "two transfers share a lane"

    def __exit__(self, *error: object) -> None:
        self._lock.release()


REFUSED = "nvidia-fs driver is not loaded"


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKvikio]:
    """Put stand-ins in the place of kvikio, cupy and the device's checksum."""
    fake = FakeKvikio()
    module = fake.module()
    monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", module.defaults)
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setattr(gds, "DeviceChecksum", FakeChecksum)
    monkeypatch.setattr(gds, "ChecksumLane", FakeLane)
    monkeypatch.setattr(gds, "gpudirect_refused", lambda directory, index: REFUSED)
    monkeypatch.setattr("tierstore.backends._host_memory.cpus_near", lambda device: None)
    yield fake
    fake.pool.shutdown()


class StandInStore(GdsStore):
    """The tier on a device that only says that it is CUDA's."""

    def __init__(self, config: TierConfig, device: Device, identity: Identity) -> None:
        super().__init__(config, StandInDevice(), identity)


@pytest.mark.usefixtures("kvikio")
class TestGdsWithFakeKvikio(TierStoreTests):
    store_class = GdsStore

    @pytest.fixture
    def device(self) -> Device:
        return StandInDevice()


class TestGdsModel(store_machine(StandInStore).TestCase):  # type: ignore[misc]
    settings = settings(
        max_examples=10,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )

    @pytest.fixture(autouse=True)
    def _stand_ins(self, kvikio: FakeKvikio) -> None:
        pass


def make_store(directory: Path, **options: Any) -> GdsStore:
    config = TierConfig(tier="gds", directories=(directory,), slots=2, **options)
    return GdsStore(config, StandInDevice(), Identity(nonce="0badcafe"))


def make_posix(directory: Path, **options: Any) -> PosixStore:
    config = TierConfig(tier="nvme", directories=(directory,), slots=2, **options)
    return PosixStore(config, CpuDevice(), Identity(nonce="0badcafe"))


@pytest.fixture
def store(kvikio: FakeKvikio, tmp_path: Path) -> Iterator[GdsStore]:
    made = make_store(tmp_path)
    made.allocate([make_optimizer()])
    write_generation(made, 1)
    yield made
    made.close()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def holds(store: GdsStore | PosixStore, seed: int) -> bool:
    return all(
        bits(found) == bits(tile_values(entry, key, tile, seed))
        for entry in store.optimizers.values()
        for key in entry.keys()
        for tile, found in enumerate(read_array(store, key))
    )


MAIN = ArrayKey("opt-0", "main")


def start_reading(store: GdsStore) -> Transfer:
    return store.read(MAIN, 1, torch.empty(1024))


def start_writing(store: GdsStore) -> Transfer:
    store.begin()
    return store.write(MAIN, 1, torch.zeros(1024))


START = {"read": start_reading, "write": start_writing}


# ------------------------------------------------------------------------------------ the files


def test_nvme_opens_what_gds_wrote(store: GdsStore, tmp_path: Path) -> None:
    store.close()
    with make_posix(tmp_path) as other:
        other.open(store.path)
        assert holds(other, 1)


@pytest.mark.usefixtures("kvikio")
def test_gds_opens_what_nvme_wrote(tmp_path: Path) -> None:
    with make_posix(tmp_path) as other:
        other.allocate([make_optimizer()])
        write_generation(other, 2)
    with make_store(tmp_path) as store:
        store.open(other.path)
        assert holds(store, 2)


def test_both_tiers_write_the_same_bytes(store: GdsStore, tmp_path: Path) -> None:
    with make_posix(tmp_path / "posix") as other:
        other.allocate([make_optimizer()])
        write_generation(other, 1)
        for mine in (store.path / "gen-a").rglob("c/*"):
            assert mine.read_bytes() == (other.path / mine.relative_to(store.path)).read_bytes()


def test_an_open_file_is_not_written_when_it_is_frozen(store: GdsStore) -> None:
    write_generation(store, 2)
    store.freeze("kept")
    before = {file.source: file.source.read_bytes() for file in store.frozen_files("kept")}
    for seed in (3, 4, 5):
        write_generation(store, seed)
        assert holds(store, seed)
    assert {source: source.read_bytes() for source in before} == before


def test_every_tile_goes_through_kvikio(store: GdsStore, kvikio: FakeKvikio) -> None:
    form = store.optimizers["opt-0"].formats["main"]
    assert sorted(kvikio.moved) == sorted(
        ("write", form.tile_offset(tile % 3)) for tile in range(10) for _ in range(3)
    )
    kvikio.moved.clear()
    read_array(store, MAIN)
    assert kvikio.moved == [("read", form.tile_offset(tile % 3)) for tile in range(10)]


@pytest.mark.parametrize("place", ["element", "checksum"])
def test_a_flipped_bit_is_refused_with_tile_and_file(store: GdsStore, place: str) -> None:
    form = store.optimizers["opt-0"].formats["exp_avg"]
    path = store.path / "gen-a/opt-0/exp_avg/c/1"
    offset = form.tile_offset(1) + (17 if place == "element" else form.tile_nbytes + 2)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(CorruptError, match="checksum") as caught:
        read_array(store, ArrayKey("opt-0", "exp_avg"))
    where = f"tile 4 of opt-0/exp_avg (byte {form.tile_offset(1)} of {path})"
    assert where in str(caught.value)
    assert bits(read_array(store, MAIN)[4]) == bits(
        tile_values(store.optimizers["opt-0"], MAIN, 4, 1)
    )


def test_a_link_in_the_place_of_a_chunk_is_not_followed(store: GdsStore, tmp_path: Path) -> None:
    path = store.path / "gen-a/opt-0/main/c/0"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    store._file.cache_clear()
    error = start_reading(store).settled.exception(timeout=60)
    assert isinstance(error, TransferError)
    assert error.errno == errno.ELOOP


def held_open(directory: Path) -> set[Path]:
    """Files below a directory that this process has open."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(Path(os.readlink(f"/proc/self/fd/{entry}")))
    return {path for path in found if path.is_relative_to(directory)}


def test_files_are_opened_once_and_closed_with_the_store(
    kvikio: FakeKvikio, tmp_path: Path
) -> None:
    with make_store(tmp_path, io_threads=1) as store:
        store.allocate([make_optimizer()])
        write_generation(store, 1)
        assert holds(store, 1)
        # To be read and to be written.
        assert sorted(kvikio.opened) == sorted(2 * list(set(kvikio.opened)))
        assert len(kvikio.opened) == 2 * 3 * 4
        assert held_open(tmp_path) == set(kvikio.opened) | {store.path / "zarr.json"}
    assert held_open(tmp_path) == set()


def test_more_files_than_are_kept_open(
    store: GdsStore, kvikio: FakeKvikio, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gds, "_OPEN_FILES", 2)
    with make_store(tmp_path / "other") as other:
        other.allocate([make_optimizer()])
        write_generation(other, 1)
        write_generation(other, 2)
        assert holds(other, 2)
        assert other._file.cache_info().currsize == 2


# ------------------------------------------------------------------------------------ sweeps


@pytest.mark.parametrize("store_class", [StandInStore, delayed(StandInStore)], ids=["gds", "late"])
@pytest.mark.parametrize("recovery", ["step", "none"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.usefixtures("kvikio")
def test_sweeps_compute_what_resident_state_would(
    store_class: type[TierStore], recovery: str, slots: int, tmp_path: Path
) -> None:
    state = make_state(store_class, tmp_path, slots=slots, recovery=recovery)
    state.fill(dict.fromkeys(state.optimizers, numbered))
    for _ in range(3):
        step(state)
    assert state.last is not None
    assert state.last.mode == "compatibility"
    assert equal(everything(state), expected(state, 3))
    state.close()


@pytest.mark.cuda
@needs_cuda
@needs_kvikio
@pytest.mark.parametrize("store_class", [GdsStore, delayed(GdsStore)], ids=["gds", "late"])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_sweeps_on_cuda(store_class: type[TierStore], slots: int, tmp_path: Path) -> None:
    state = make_state(store_class, tmp_path, open_device(torch.device("cuda")), slots=slots)
    state.fill(dict.fromkeys(state.optimizers, numbered))
    for _ in range(6):
        step(state)
    assert equal(everything(state), expected(state, 6))
    state.close()


# ------------------------------------------------------------------------------------ errors


def raising(text: str, *, at_once: bool) -> Callable[[str], Any]:
    def broken(what: str) -> Any:
        if at_once:
            raise RuntimeError(text)
        future: Future[int] = Future()
        future.set_exception(RuntimeError(text))
        return FakeFuture(future)

    return broken


@pytest.mark.parametrize("at_once", [True, False])
def test_a_full_drive_is_a_capacity_error_with_its_errno(
    store: GdsStore, kvikio: FakeKvikio, at_once: bool
) -> None:
    kvikio.broken = raising("POSIX error: No space left on device", at_once=at_once)
    transfer = start_writing(store)
    error = transfer.settled.exception(timeout=60)
    assert isinstance(error, CapacityError)
    assert error.errno == errno.ENOSPC
    assert transfer.device_done.exception(timeout=60) is error
    store.rollback()


@pytest.mark.parametrize("what", ["read", "write"])
@pytest.mark.parametrize("at_once", [True, False])
def test_any_other_error_of_kvikio_names_file_and_byte(
    store: GdsStore, kvikio: FakeKvikio, what: str, at_once: bool
) -> None:
    kvikio.broken = raising("cuFile: internal error", at_once=at_once)
    error = START[what](store).settled.exception(timeout=60)
    assert isinstance(error, TransferError)
    assert error.errno == errno.EIO
    generation = {"read": "gen-a", "write": "gen-b"}[what]
    offset = store.optimizers["opt-0"].formats["main"].tile_offset(1)
    path = store.path / generation / "opt-0/main/c/0"
    wording = f"{what.removesuffix('e')}ing at byte {offset} of {path}"
    assert wording in str(error)
    assert "cuFile: internal error" in str(error)
    if what == "write":
        store.rollback()


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_short_count_is_an_error(store: GdsStore, kvikio: FakeKvikio, what: str) -> None:
    short: Future[int] = Future()
    short.set_result(4095)
    kvikio.broken = lambda what: FakeFuture(short)
    error = START[what](store).settled.exception(timeout=60)
    assert isinstance(error, TransferError)
    assert "4095 of 4096 bytes" in str(error)
    if what == "write":
        store.rollback()


class Gated:
    """kvikio's end of a transfer, which comes when the test lets it."""

    def __init__(self) -> None:
        self.asked, self.gate = threading.Event(), threading.Event()

    def get(self) -> int:
        self.asked.set()
        assert self.gate.wait(60)
        return 4096


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_slot_is_kept_until_kvikio_is_done_whatever_the_trailer_met(
    store: GdsStore, kvikio: FakeKvikio, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    gated = Gated()
    kvikio.broken = lambda what: gated

    def fail(*_: Any) -> None:
        raise TransferError(errno.EIO, "this drive was told to fail")

    monkeypatch.setattr(_direct_io, {"read": "read_full", "write": "write_full"}[what], fail)
    monkeypatch.setattr(_direct_io, "write_json", lambda path, value: None)
    transfer = START[what](store)
    assert gated.asked.wait(60)
    assert not transfer.device_done.done()
    assert not transfer.settled.done()
    gated.gate.set()
    with pytest.raises(TransferError, match="told to fail"):
        transfer.settled.result(timeout=60)
    with pytest.raises(TransferError, match="told to fail"):
        transfer.device_done.result(timeout=60)
    if what == "write":
        store.rollback()


def test_a_tensor_is_free_only_when_kvikio_is_done(store: GdsStore, kvikio: FakeKvikio) -> None:
    gated = Gated()
    kvikio.broken = lambda what: gated
    transfer = start_writing(store)
    assert gated.asked.wait(60)
    assert not transfer.device_done.done()
    gated.gate.set()
    assert transfer.device_done.result(timeout=60) == ()
    store.settle()
    store.rollback()


def test_transfers_wait_for_the_events_they_are_given(store: GdsStore, kvikio: FakeKvikio) -> None:
    moved_before: list[int] = []
    kvikio.moved.clear()
    event: Any = SimpleNamespace(synchronize=lambda: moved_before.append(len(kvikio.moved)))
    store.read(MAIN, 1, torch.empty(1024), after=(event, event)).settled.result(timeout=60)
    store.begin()
    store.write(MAIN, 1, torch.zeros(1024), after=(event,)).settled.result(timeout=60)
    assert moved_before == [0, 0, 1]
    store.rollback()


def test_after_errors_every_thread_can_still_work(store: GdsStore, kvikio: FakeKvikio) -> None:
    for at_once in (True, False):
        kvikio.broken = raising("cuFile: internal error", at_once=at_once)
        reads = [start_reading(store) for _ in range(4 * store.config.io_threads)]
        assert all(read.settled.exception(timeout=60) is not None for read in reads)
    kvikio.broken = None
    write_generation(store, 2)
    assert holds(store, 2)
    assert len(store._lanes) == 2 * store.config.io_threads


def test_reading_without_a_current_generation_is_refused(store: GdsStore) -> None:
    store._holds.clear()
    with pytest.raises(StateError, match="no current generation"):
        start_reading(store)


# ------------------------------------------------------------------------------------ settings


def test_settings_are_the_store_s_while_it_lives_and_put_back_at_close(
    kvikio: FakeKvikio, tmp_path: Path
) -> None:
    before = dict(kvikio.settings)
    store = make_store(tmp_path, io_threads=3)
    store.allocate([make_optimizer()])
    assert (kvikio.settings["compat_mode"], kvikio.settings["num_threads"]) == ("ON", 6)
    assert kvikio.settings["auto_direct_io_read"] is True
    store.close()
    assert kvikio.settings == before


def test_settings_are_put_back_when_the_store_can_not_be_made(
    kvikio: FakeKvikio, store: GdsStore, tmp_path: Path
) -> None:
    path = store.path
    store.close()
    before = dict(kvikio.settings)
    with make_store(tmp_path) as twin, pytest.raises(StateError, match="exists"):
        twin.allocate([make_optimizer()])
    assert kvikio.settings == before
    (path / "gen-a/opt-0/main/c/0").unlink()
    with make_store(tmp_path) as twin, pytest.raises(CorruptError, match="missing"):
        twin.open(path)
    assert kvikio.settings == before


def test_what_starts_and_fails_half_way_gives_everything_back(
    kvikio: FakeKvikio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(device_index: int) -> None:
        raise MemoryError("of the device")

    monkeypatch.setattr(gds, "ChecksumLane", no_memory)
    before = dict(kvikio.settings)
    store = make_store(tmp_path)
    with pytest.raises(MemoryError):
        store.allocate([make_optimizer()])
    store.close()
    assert kvikio.settings == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("kvikio")
def test_a_file_system_without_direct_io_is_said_and_used(
    kvikio: FakeKvikio,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reason = "the file system refuses O_DIRECT (Invalid argument)"
    monkeypatch.setattr(_direct_io, "direct_io_refused", lambda directory: reason)
    with make_store(tmp_path) as store:
        store.allocate([make_optimizer()])
        assert kvikio.settings["auto_direct_io_read"] is False
        assert kvikio.settings["auto_direct_io_write"] is False
        write_generation(store, 3)
        assert holds(store, 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{reason} in {tmp_path}" in caplog.text


MIB = 2**20


@pytest.mark.parametrize("cap", [None, 2**40, 10 * MIB, 2 * MIB + 8192])
def test_bounce_buffers_shrink_with_the_cap(
    kvikio: FakeKvikio, tmp_path: Path, cap: int | None
) -> None:
    most = min(16 * MIB, (cap or 2**40) // 2)
    with make_store(tmp_path, io_threads=1, host_memory_nbytes=cap) as store:
        store.allocate([make_optimizer()])
        found = kvikio.settings["bounce_buffer_size"]
        assert most - 8192 <= found <= most
        assert found % 4096 == 0
        assert store.host_nbytes >= 2 * found


@pytest.mark.parametrize("cap", [2 * MIB + 8192, 10 * MIB, 10 * MIB + 4095])
@pytest.mark.usefixtures("kvikio")
def test_all_host_memory_stays_within_the_cap(tmp_path: Path, cap: int) -> None:
    with make_store(tmp_path, io_threads=1, host_memory_nbytes=cap) as store:
        store.allocate([make_optimizer()])
        assert store.host_nbytes <= cap


def test_a_cap_below_the_minimum_is_refused_with_the_number(
    kvikio: FakeKvikio, tmp_path: Path
) -> None:
    before = dict(kvikio.settings)
    store = make_store(tmp_path, io_threads=3, host_memory_nbytes=6 * MIB - 1)
    with pytest.raises(ConfigError, match=r"at least 6,\d{3},\d{3}") as caught:
        store.allocate([make_optimizer()])
    assert "--optimizer-state-host-memory" in str(caught.value)
    assert not store.path.exists()
    assert kvikio.settings == before


# ------------------------------------------------------------------------------------ the mode


def test_without_gpudirect_the_mode_is_compatibility_and_the_reason_is_logged_once(
    kvikio: FakeKvikio, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tierstore")
    with make_store(tmp_path) as store:
        probe = store.probe(store.config, store.device)
        assert (probe.ok, probe.mode) == (True, "compatibility")
        assert REFUSED in probe.reason
        store.allocate([make_optimizer()])
        assert store.mode == "compatibility"
        write_generation(store, 1)
        assert holds(store, 1)
    assert caplog.text.count(REFUSED) == 1
    assert f"GPUDirect Storage does not work in {tmp_path} ({REFUSED})" in caplog.text


@pytest.mark.parametrize("choice", ["auto", "require"])
def test_with_gpudirect_the_mode_says_so_and_no_buffers_are_made(
    kvikio: FakeKvikio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    monkeypatch.setattr(gds, "gpudirect_refused", lambda directory, index: "")
    before = kvikio.settings["bounce_buffer_size"]
    with make_store(tmp_path, gds=choice, io_threads=2) as store:
        probe = store.probe(store.config, store.device)
        assert (probe.ok, probe.mode, probe.reason) == (True, "gpudirect", "")
        store.allocate([make_optimizer()])
        assert store.mode == "gpudirect"
        assert kvikio.settings["compat_mode"] == "OFF"
        assert kvikio.settings["bounce_buffer_size"] == before
        assert store.host_nbytes == 4 * 4096  # a block for each thread's checksum
        write_generation(store, 1)
        assert holds(store, 1)


@pytest.mark.usefixtures("kvikio")
def test_required_gpudirect_is_refused_with_the_reason_and_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gds, "what_is_missing", lambda directory: ["no module", "no cufile.json"])
    store = make_store(tmp_path, gds="require")
    probe = store.probe(store.config, store.device)
    assert (probe.ok, probe.mode) == (False, "none")
    with pytest.raises(ConfigError) as caught:
        store.allocate([make_optimizer()])
    for said in (probe.reason, str(caught.value)):
        assert REFUSED in said
        assert "no module; no cufile.json" in said
        assert str(tmp_path) in said
    assert not store.path.exists()


def test_required_gpudirect_is_refused_when_a_store_is_opened(
    store: GdsStore, kvikio: FakeKvikio, tmp_path: Path
) -> None:
    store.close()
    before = dict(kvikio.settings)
    again = make_store(tmp_path, gds="require")
    with pytest.raises(ConfigError, match=f"--optimizer-state-gds=require.*{REFUSED}"):
        again.open(store.path)
    again.close()
    assert kvikio.settings == before


@pytest.mark.usefixtures("kvikio")
def test_gpudirect_must_work_in_every_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, int]] = []

    def refuse_the_second(directory: Path, index: int) -> str:
        asked.append((directory, index))
        return REFUSED if directory.name == "b" else ""

    monkeypatch.setattr(gds, "gpudirect_refused", refuse_the_second)
    config = TierConfig(tier="gds", directories=(tmp_path / "a", tmp_path / "b"))
    probe = GdsStore.probe(config, StandInDevice())
    assert probe.mode == "compatibility"
    assert f"in {tmp_path / 'b'} ({REFUSED})" in probe.reason
    assert asked == [(tmp_path / "a", 0), (tmp_path / "b", 0)]


@pytest.mark.usefixtures("kvikio")
def test_the_probe_says_that_tensors_must_be_on_a_cuda_device(tmp_path: Path) -> None:
    config = TierConfig(tier="gds", directories=(tmp_path,))
    probe = GdsStore.probe(config, CpuDevice())
    assert (probe.ok, probe.mode) == (False, "none")
    assert "the tensors are on cpu" in probe.reason


@pytest.mark.parametrize("missing", ["kvikio", "cupy"])
@pytest.mark.usefixtures("kvikio")
def test_the_probe_says_which_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    config = TierConfig(tier="gds", directories=(tmp_path,))
    probe = GdsStore.probe(config, StandInDevice())
    assert (probe.ok, probe.mode) == (False, "none")
    assert missing in probe.reason
    assert "install tierstore[gds-cu12] or tierstore[gds-cu13]" in probe.reason


@pytest.mark.usefixtures("kvikio")
def test_the_probe_says_what_the_file_system_says(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = TierConfig(tier="gds", directories=(tmp_path / "file" / "below",))
    probe = GdsStore.probe(config, StandInDevice())
    assert (probe.ok, probe.mode) == (False, "none")
    assert probe.reason


# --------------------------------------------------------------------------- what is missing


class FakeMachine:
    """A /proc and an /etc on which nothing is missing."""

    def __init__(self, directory: Path) -> None:
        self.proc, self.etc = directory / "proc", directory / "etc"
        self.place = directory / "state"
        for made in (self.proc / "driver/nvidia-fs", self.proc / "self", self.etc, self.place):
            made.mkdir(parents=True)
        (self.proc / "driver/nvidia-fs/version").write_text("version: 2.17\n")
        (self.etc / "cufile.json").write_text("{}")
        self.mounts(("/", "ext4"))

    def mounts(self, *mounts: tuple[str, str]) -> None:
        lines = [f"/dev/x {place} {kind} rw,relatime 0 0\n" for place, kind in mounts]
        (self.proc / "self/mounts").write_text("".join(lines))

    def missing(self, place: Path | None = None) -> list[str]:
        return _gds_mode.what_is_missing(place or self.place, self.proc, self.etc)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    monkeypatch.delenv("CUFILE_ENV_PATH_JSON", raising=False)
    monkeypatch.setattr(_direct_io, "direct_io_refused", lambda directory: "")
    return FakeMachine(tmp_path)


def test_nothing_is_missing_where_all_is_there(machine: FakeMachine) -> None:
    assert machine.missing() == []


def test_a_kernel_module_that_is_not_loaded_is_named(machine: FakeMachine) -> None:
    (machine.proc / "driver/nvidia-fs/version").unlink()
    (found,) = machine.missing()
    assert "nvidia-fs" in found
    assert "modprobe" in found


def test_a_configuration_that_is_not_there_is_named(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.etc / "cufile.json").unlink()
    (found,) = machine.missing()
    assert str(machine.etc / "cufile.json") in found
    assert "CUFILE_ENV_PATH_JSON" in found
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "mine.json"))
    (found,) = machine.missing()
    assert str(tmp_path / "mine.json") in found
    (tmp_path / "mine.json").write_text("{}")
    assert machine.missing() == []


def test_a_refused_direct_opening_is_said(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "the file system refuses O_DIRECT (Invalid argument)"
    monkeypatch.setattr(_direct_io, "direct_io_refused", lambda directory: reason)
    assert machine.missing() == [reason]


@pytest.mark.parametrize("kind", ["tmpfs", "overlay", "zfs"])
def test_a_file_system_that_cufile_does_not_know_is_named(machine: FakeMachine, kind: str) -> None:
    machine.mounts(("/", kind))
    (found,) = machine.missing()
    assert f"the file system is {kind};" in found
    assert "xfs" in found


def test_the_longest_mount_point_counts(machine: FakeMachine) -> None:
    place = machine.place
    machine.mounts((str(place), "xfs"), ("/", "overlay"), (str(place.parent), "tmpfs"))
    assert machine.missing() == []
    # A name that only begins alike is another directory.
    machine.mounts(("/", "xfs"), (str(place)[:-1], "tmpfs"))
    assert machine.missing() == []


def test_of_two_mounts_at_one_place_the_later_one_counts(machine: FakeMachine) -> None:
    machine.mounts((str(machine.place), "xfs"), (str(machine.place), "tmpfs"))
    assert "the file system is tmpfs;" in machine.missing()[0]
    machine.mounts((str(machine.place), "tmpfs"), (str(machine.place), "xfs"))
    assert machine.missing() == []


@pytest.mark.parametrize("name", ["my drive", "größe", "a\tb", "x\\y"])
def test_names_of_mount_points_are_read_as_the_kernel_writes_them(
    machine: FakeMachine, name: str
) -> None:
    place = machine.place / name
    place.mkdir()
    written = str(place)
    for character in "\\ \t\n":  # these the kernel replaces; all others it leaves
        written = written.replace(character, f"\\{ord(character):03o}")
    machine.mounts(("/", "overlay"), (written, "ext4"))
    assert machine.missing(place) == []


def test_a_link_to_a_directory_is_followed(machine: FakeMachine, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(machine.place)
    machine.mounts(("/", "overlay"), (str(machine.place), "ext4"))
    assert machine.missing(tmp_path / "link") == []


# ------------------------------------------------------------------------- finding out by trying


class Attempts:
    """Takes the place of `subprocess.run`, and answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.answer: Callable[[], tuple[int, str]] = lambda: (0, "")
        monkeypatch.setattr(_gds_mode, "_answers", {})
        monkeypatch.setattr(subprocess, "run", self._run)

    def _run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.made.append(command)
        self.environments.append(options["env"])
        code, said = self.answer()
        return subprocess.CompletedProcess(command, code, "", said)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    return Attempts(monkeypatch)


def test_gpudirect_is_tried_in_a_process_without_any_fallback(
    attempts: Attempts, tmp_path: Path
) -> None:
    assert _gds_mode.gpudirect_refused(tmp_path, 3) == ""
    assert attempts.made[0][1:] == ["-m", "tierstore.backends._gds_mode", str(tmp_path), "3"]
    environment = attempts.environments[0]
    assert environment["KVIKIO_COMPAT_MODE"] == "OFF"
    assert environment["CUFILE_ALLOW_COMPAT_MODE"] == "false"
    assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("answer", [(0, ""), (1, "no driver")])
def test_each_file_system_and_device_is_asked_once(
    attempts: Attempts, tmp_path: Path, answer: tuple[int, str]
) -> None:
    attempts.answer = lambda: answer
    (tmp_path / "below").mkdir()
    for device in (0, 1, 0):
        for directory in (tmp_path, tmp_path / "below"):
            assert _gds_mode.gpudirect_refused(directory, device) == answer[1]
    assert [command[-1] for command in attempts.made] == ["0", "1"]
    _gds_mode.gpudirect_refused(Path("/proc"), 0)  # another file system
    assert len(attempts.made) == 3


@pytest.mark.parametrize(
    ("code", "stderr", "said"),
    [
        (1, "Traceback\n  File x\nOSError: no driver\n\n  \n", "OSError: no driver"),
        (1, "only line", "only line"),
        (-11, "", "the attempt ended with status -11"),
        (7, "\n \n", "the attempt ended with status 7"),
        (0, "a warning", ""),
    ],
)
def test_what_the_attempt_said_last_is_the_reason(
    attempts: Attempts, tmp_path: Path, code: int, stderr: str, said: str
) -> None:
    attempts.answer = lambda: (code, stderr)
    assert _gds_mode.gpudirect_refused(tmp_path, 0) == said


def test_an_attempt_that_hangs_is_a_refusal(attempts: Attempts, tmp_path: Path) -> None:
    def hang() -> tuple[int, str]:
        raise subprocess.TimeoutExpired("python", 120)

    attempts.answer = hang
    assert _gds_mode.gpudirect_refused(tmp_path, 0) == "the attempt did not end within 120 s"


@pytest.mark.skipif(not _MISSING, reason="kvikio is there")
def test_the_attempt_of_a_real_process_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gds_mode, "_answers", {})
    assert _gds_mode.gpudirect_refused(tmp_path, 0).startswith("ModuleNotFoundError: No module")


@pytest.mark.cuda
@needs_cuda
@needs_kvikio
def test_gpudirect_is_really_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gds_mode, "_answers", {})
    refused = _gds_mode.gpudirect_refused(tmp_path, 0)
    print("GPUDirect Storage:", refused or "works")
    assert "\n" not in refused
    assert "ModuleNotFoundError" not in refused
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------- the checksum


def crc_by_segments(data: bytes, *, n_threads: int | None = None) -> int:
    """What `KERNEL` computes, in numpy: all segments side by side, one word after the other."""
    segments = np.frombuffer(data, "<u4").reshape(-1, SEGMENT_NBYTES // 4)[:n_threads]
    tables = word_tables()
    crc: npt.NDArray[Any] = np.zeros(len(segments), np.uint32)
    for words in segments.T:
        crc ^= words
        crc = (
            tables[3][crc & 255]
            ^ tables[2][(crc >> 8) & 255]
            ^ tables[1][(crc >> 16) & 255]
            ^ tables[0][crc >> 24]
        )
    factor: npt.NDArray[Any] = shift_table(len(data) // SEGMENT_NBYTES)[::-1][: len(segments)]
    product = np.zeros_like(crc)
    for _ in range(32):
        product ^= np.where(crc >> 31, factor, np.uint32(0))
        crc <<= np.uint32(1)
        factor = (factor >> 1) ^ np.where(factor & 1, np.uint32(0x82F63B78), np.uint32(0))
    return int(np.bitwise_xor.reduce(product))


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def as_bytes(linear: int, nbytes: int) -> bytes:
    zeros = int.from_bytes(checksum(bytes(nbytes)), "little")
    return (linear ^ zeros).to_bytes(4, "little")


@pytest.mark.parametrize("n_segments", [1, 2, 3, 7, 8, 127, 128, 129, 1001, 8192])
def test_the_kernel_s_arithmetic_gives_the_checksum(n_segments: int) -> None:
    data = random_bytes(n_segments * SEGMENT_NBYTES, n_segments)
    assert as_bytes(crc_by_segments(data), len(data)) == checksum(data)


@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 255]))
def test_the_kernel_s_arithmetic_gives_the_checksum_of_any_data(
    n_segments: int, seed: int, fill: int
) -> None:
    data = bytearray([fill]) * (n_segments * SEGMENT_NBYTES)
    place = seed % len(data)
    data[place:] = random_bytes(len(data) - place, seed)
    assert as_bytes(crc_by_segments(bytes(data)), len(data)) == checksum(data)


@pytest.mark.parametrize("longest", [1, 2, 3, 64, 100])
def test_a_short_table_of_shifts_begins_a_longer_one(longest: int) -> None:
    table = shift_table(longest)
    assert table.dtype == np.uint32
    assert len(table) == longest
    assert np.array_equal(table, shift_table(4096)[:longest])


def test_the_first_table_is_the_one_of_single_bytes() -> None:
    table = word_tables()[0]
    for byte in (0, 1, 128, 255):
        crc = table[(0xFFFFFFFF ^ byte) & 255] ^ 0x00FFFFFF ^ 0xFFFFFFFF
        assert int(crc).to_bytes(4, "little") == checksum(bytes([byte]))


class FakeCupy(ModuleType):
    """What the checksum uses of cupy, with a kernel that runs `crc_by_segments`."""

    uint32 = np.uint32

    def __init__(self) -> None:
        super().__init__("cupy")
        self.options: tuple[str, ...] = ()
        self.cuda = SimpleNamespace(
            Device=lambda index: _Context(), Stream=lambda non_blocking: _Context()
        )

    @staticmethod
    def asarray(array: npt.NDArray[np.uint32]) -> Any:
        return array.view(_Array)

    @staticmethod
    def zeros(count: int, dtype: type[np.uint32]) -> Any:
        return np.full(count, 0xDEAD, dtype).view(_Array)  # what the last one left in it

    def RawKernel(self, code: str, name: str, options: tuple[str, ...]) -> Any:  # noqa: N802
        assert code is KERNEL
        assert name in code
        self.options = options
        return _FakeKernel()


class _Array(np.ndarray[Any, Any]):
    def get(self) -> npt.NDArray[np.uint32]:
        return np.asarray(self)


class _Context(contextlib.nullcontext[None]):
    def synchronize(self) -> None:
        pass


class _FakeKernel:
    def compile(self) -> None:
        pass

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        address, n_segments, tables, shifts, result = arguments
        assert np.array_equal(tables, word_tables())
        assert len(shifts) >= n_segments
        assert np.array_equal(shifts, shift_table(len(shifts)))
        assert block[0] % 32 == 0  # whole warps, or the shuffles are undefined
        data = ctypes.string_at(address, int(n_segments) * SEGMENT_NBYTES)
        result[0] ^= np.uint32(crc_by_segments(data, n_threads=grid[0] * block[0]))


@pytest.mark.parametrize("nbytes", [4096, 4096 * 15, 4096 * 16, 4096 * 17, 4096 * 33])
def test_the_checksum_around_the_kernel(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    checksums, lane = DeviceChecksum(4096 * 33, 0), ChecksumLane(0)
    assert f"-DSEGMENT_NBYTES={SEGMENT_NBYTES}" in cupy.options
    assert "-DPOLYNOMIAL=0x82f63b78u" in cupy.options
    for seed in range(2):  # the second time finds what the first one left
        data = random_bytes(nbytes, seed)
        assert checksums.of(torch.frombuffer(bytearray(data), dtype=torch.uint8), lane) == checksum(
            data
        )


@pytest.mark.cuda
@needs_cuda
@needs_kvikio
def test_checksums_of_a_real_device_from_several_threads() -> None:
    sizes = [1024 * k for k in (1, 2, 3, 5, 63, 64, 65, 1000)] + [16 * MIB]
    checksums = DeviceChecksum(max(sizes), 0)
    device = open_device(torch.device("cuda:0"))
    held = [(nbytes, random_bytes(nbytes, nbytes)) for nbytes in sizes]
    tensors = [
        torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device.torch_device)
        for _, data in held
    ]
    device.synchronize()

    def run(thread: int) -> list[bytes]:
        lane = ChecksumLane(0)
        turned = tensors[thread:] + tensors[:thread]
        return [checksums.of(tensor, lane) for tensor in turned * 5]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(8)))
    wanted = [checksum(data) for _, data in held]
    for thread, answers in enumerate(found):
        assert answers == (wanted[thread:] + wanted[:thread]) * 5
