"""Host memory: exact, resident, locked in parts, near the device; and the blocks cut from it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.backends import _host_memory
from tierstore.backends._host_memory import BlockPool, HostSlab, _parts
from tierstore.backends._numa import cpus_near, parse_cpus
from tierstore.device import CpuDevice, Device, open_device
from tierstore.errors import CapacityError

PAGE = 4096


class LockingDevice(CpuDevice):
    """Says that it copies asynchronously, so that memory is locked for it."""

    asynchronous = True


class FakeCudart:
    """Keeps account of locked memory; refuses where it is told to."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.refuse_at = -1

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        if len(self.calls) == self.refuse_at:
            return 2
        self.calls.append((address, nbytes))
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return fake


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host_memory, "_REGISTER_NBYTES", 2 * PAGE)
    monkeypatch.setattr(_host_memory, "_FAULT_NBYTES", PAGE)


# ------------------------------------------------------------------------------------ the slab


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * 2**20 + 5])
@pytest.mark.parametrize("fault_nbytes", [PAGE, 64 * 2**20])
def test_a_slab_is_of_exact_size_zero_and_writable(
    nbytes: int, fault_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_host_memory, "_FAULT_NBYTES", fault_nbytes)
    slab = HostSlab(nbytes, CpuDevice())
    assert (slab.nbytes, slab.tensor.numel(), slab.tensor.dtype) == (nbytes, nbytes, torch.uint8)
    assert slab.tensor.data_ptr() % PAGE == 0
    assert not slab.tensor.any()
    slab.tensor.fill_(7)
    slab.buffer(nbytes - 1, 1)[0] = 9
    assert slab.tensor[-1] == 9
    assert bytes(slab.buffer(0, nbytes - 1)) == b"\7" * (nbytes - 1)
    slab.close()
    assert slab.tensor[-1] == 9  # the memory goes with the last view of it


def resident_pages(address: int, nbytes: int) -> int:
    """Count pages of a stretch that are in memory."""
    pages = (ctypes.c_ubyte * -(-nbytes // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert libc.mincore(address, nbytes, ctypes.addressof(pages)) == 0
    return sum(page & 1 for page in pages)


@pytest.mark.skipif(os.sysconf("SC_PAGE_SIZE") != PAGE, reason="pages are larger here")
def test_every_page_of_a_slab_is_resident() -> None:
    slab = HostSlab(300 * PAGE, CpuDevice(), [100 * PAGE])
    assert resident_pages(slab.tensor.data_ptr(), slab.nbytes) == 300


@pytest.mark.parametrize("nbytes", [2**62, 2**70])
def test_memory_that_no_host_has_is_a_capacity_error(nbytes: int) -> None:
    with pytest.raises(CapacityError, match=f"{nbytes:,} bytes") as caught:
        HostSlab(nbytes, CpuDevice())
    assert caught.value.errno == errno.ENOMEM


class FakeLibc:
    """A libc whose ``madvise`` fails."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.asked: list[tuple[int, int, int]] = []
        self.madvise: Any = SimpleNamespace()

    def __call__(self, name: str | None, use_errno: bool) -> Any:
        def madvise(address: int, nbytes: int, advice: int) -> int:
            self.asked.append((address, nbytes, advice))
            ctypes.set_errno(self.code)
            return -1

        return SimpleNamespace(madvise=madvise)


@pytest.mark.usefixtures("small_parts")
def test_a_kernel_without_populate_is_answered_by_touching_every_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    libc = FakeLibc(errno.EINVAL)
    touched: list[tuple[int, int]] = []
    memset = ctypes.memset

    def recorded(address: int, value: int, nbytes: int) -> None:
        memset(address, value, nbytes)
        touched.append((address, nbytes))

    monkeypatch.setattr(
        _host_memory,
        "ctypes",
        SimpleNamespace(**{**vars(ctypes), "CDLL": libc, "memset": recorded}),
    )
    slab = HostSlab(3 * PAGE + 5, CpuDevice())
    start = slab.tensor.data_ptr()
    wanted = [
        (start + place, min(PAGE, slab.nbytes - place)) for place in range(0, 3 * PAGE + 5, PAGE)
    ]
    assert sorted(touched) == wanted
    assert sorted(libc.asked) == [(*part, 23) for part in wanted]
    assert not slab.tensor.any()


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])
@pytest.mark.usefixtures("small_parts")
def test_pages_that_can_not_be_had_are_a_capacity_error(
    code: int, monkeypatch: pytest.MonkeyPatch, cudart: FakeCudart
) -> None:
    monkeypatch.setattr(
        _host_memory, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": FakeLibc(code)})
    )
    with pytest.raises(CapacityError, match="the host has no 16,384 bytes") as caught:
        HostSlab(4 * PAGE, LockingDevice())
    assert caught.value.errno == errno.ENOMEM
    assert cudart.calls == []


# ------------------------------------------------------------------------------------ its parts


@st.composite
def slabs(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Bytes and cuts, in units that mean nothing."""
    steps = draw(st.lists(st.integers(0, 30), max_size=12))
    cuts = list(itertools.accumulate(steps))
    return (cuts or [0])[-1] + draw(st.integers(1, 60)), cuts


@given(slabs(), st.integers(1, 40))
def test_parts_cover_the_slab_end_at_cuts_and_are_no_longer_than_they_must_be(
    slab: tuple[int, list[int]], limit: int
) -> None:
    nbytes, cuts = slab
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_host_memory, "_REGISTER_NBYTES", limit)
        parts = list(_parts(nbytes, iter(cuts)))
    assert parts[0].start == 0
    assert parts[-1].stop == nbytes
    for part, following in itertools.pairwise(parts):
        assert part.stop == following.start
        assert part.stop in cuts
        assert len(part) + _first_step(following, cuts) > limit  # it could not be longer
    for part in parts:
        assert len(part) > 0
        if len(part) > limit:
            assert not [cut for cut in cuts if part.start < cut < part.stop]


def _first_step(part: range, cuts: Sequence[int]) -> int:
    """Bytes up to the first cut after the start of a part."""
    return next((cut for cut in cuts if cut > part.start), part.stop) - part.start


def test_a_slab_without_cuts_is_one_part() -> None:
    assert list(_parts(2**50, ())) == [range(2**50)]


# ------------------------------------------------------------------------------------ the lock


@pytest.mark.usefixtures("small_parts")
def test_parts_are_locked_in_order_and_unlocked_at_close(cudart: FakeCudart) -> None:
    slab = HostSlab(5 * PAGE + 3, LockingDevice(), range(0, 5 * PAGE, PAGE))
    start = slab.tensor.data_ptr()
    wanted = [(start, 2 * PAGE), (start + 2 * PAGE, 2 * PAGE), (start + 4 * PAGE, PAGE + 3)]
    assert cudart.calls == wanted
    assert cudart.locked == dict(wanted)
    slab.close()
    assert cudart.locked == {}
    slab.close()


@pytest.mark.usefixtures("small_parts")
def test_a_part_is_resident_before_it_is_locked(
    cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    real = cudart.cudaHostRegister

    def register(address: int, nbytes: int, flags: int) -> int:
        pages = resident_pages(address, nbytes)
        found.append(pages == -(-nbytes // os.sysconf("SC_PAGE_SIZE")))
        return real(address, nbytes, flags)

    monkeypatch.setattr(cudart, "cudaHostRegister", register)
    HostSlab(6 * PAGE, LockingDevice(), range(0, 6 * PAGE, 2 * PAGE)).close()
    assert found == [True] * 3


def test_nothing_is_locked_where_copies_are_synchronous(cudart: FakeCudart) -> None:
    HostSlab(5 * PAGE, CpuDevice()).close()
    assert cudart.calls == []


@pytest.mark.usefixtures("small_parts")
def test_a_refused_lock_undoes_the_ones_before_it_and_says_what_to_raise(
    cudart: FakeCudart,
) -> None:
    cudart.refuse_at = 2
    with pytest.raises(CapacityError, match="ulimit -l unlimited") as caught:
        HostSlab(8 * PAGE, LockingDevice(), range(0, 8 * PAGE, PAGE))
    assert caught.value.errno == errno.ENOMEM
    assert "refused after 16,384 (cudaHostRegister: 2)" in str(caught.value)
    assert len(cudart.calls) == 2
    assert cudart.locked == {}


@pytest.mark.parametrize(
    ("asynchronous", "what"), [(True, "page-locked"), (False, "made resident")]
)
@pytest.mark.usefixtures("small_parts", "cudart")
def test_progress_of_a_long_lock_is_told(
    asynchronous: bool,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", logger="tierstore.memory")
    clock = itertools.count(0.0, 3.0)
    monkeypatch.setattr(_host_memory, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    device: Device = LockingDevice() if asynchronous else CpuDevice()
    HostSlab(6 * PAGE, device, range(0, 6 * PAGE, PAGE)).close()
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    told = [record.getMessage() for record in caplog.records]
    assert all(f"of 24.00 KiB of host memory {what} in" in line for line in told)
    # Each look at the clock is 3 s later, and 5 s lie between two lines.
    assert [line.split(" of ")[0] for line in told] == ["16.00 KiB", "24.00 KiB"]


@pytest.mark.usefixtures("small_parts", "cudart")
def test_a_short_lock_is_not_worth_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="tierstore.memory")
    monkeypatch.setattr(_host_memory, "time", SimpleNamespace(monotonic=lambda: 1.0))
    HostSlab(6 * PAGE, LockingDevice(), range(0, 6 * PAGE, PAGE)).close()
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("small_parts")
def test_a_slab_is_really_locked_on_cuda_part_by_part() -> None:
    device = open_device(torch.device("cuda"))
    slab = HostSlab(8 * PAGE, device, range(0, 8 * PAGE, PAGE))
    assert all(slab.tensor[place:].is_pinned() for place in range(0, 8 * PAGE, PAGE))
    slab.close()
    assert not slab.tensor.is_pinned()


# ------------------------------------------------------------------------------------ the node


class FakeSys:
    """A /sys with one device, at 0001:1a:02.0."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.device = path / "bus/pci/devices/0001:1a:02.0"
        self.node = path / "devices/system/node/node1"
        self.device.mkdir(parents=True)
        self.node.mkdir(parents=True)
        (self.device / "numa_node").write_text("1\n")
        (self.node / "cpulist").write_text("2-3,8\n")

    def near(self) -> set[int] | None:
        return cpus_near(torch.device("cuda", 0), self.path)


@pytest.fixture
def sys_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSys:
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1A, pci_device_id=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 8})
    return FakeSys(tmp_path)


def test_processors_of_the_device_s_node_are_near(sys_tree: FakeSys) -> None:
    assert sys_tree.near() == {2, 3, 8}


def test_only_processors_that_this_process_may_use_count(
    sys_tree: FakeSys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3})
    assert sys_tree.near() == {3}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert sys_tree.near() is None


@pytest.mark.parametrize("text", ["-1\n", "", "none\n"])
def test_a_machine_that_does_not_say_the_node_says_nothing(sys_tree: FakeSys, text: str) -> None:
    (sys_tree.device / "numa_node").write_text(text)
    assert sys_tree.near() is None


@pytest.mark.parametrize("name", ["device", "node"])
def test_a_file_that_is_missing_says_nothing(sys_tree: FakeSys, name: str) -> None:
    for path in getattr(sys_tree, name).iterdir():
        path.unlink()
    assert sys_tree.near() is None


def test_a_torch_that_does_not_tell_where_the_device_is_says_nothing(
    sys_tree: FakeSys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert sys_tree.near() is None


def test_nothing_is_near_to_the_cpu(sys_tree: FakeSys) -> None:
    assert cpus_near(torch.device("cpu"), sys_tree.path) is None


def test_pages_are_faulted_in_by_threads_near_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.sched_getaffinity(0)
    near = {min(own)}
    where: list[set[int]] = []
    real = HostSlab._fault_in

    def fault_in(self: HostSlab, part: range) -> None:
        where.append(os.sched_getaffinity(0))
        real(self, part)

    monkeypatch.setattr(_host_memory, "_FAULT_NBYTES", PAGE)
    monkeypatch.setattr(_host_memory, "cpus_near", lambda device: near)
    monkeypatch.setattr(HostSlab, "_fault_in", fault_in)
    HostSlab(4 * PAGE, CpuDevice())
    assert where == [near] * 4
    assert os.sched_getaffinity(0) == own


@pytest.mark.parametrize(
    ("listed", "cpus"),
    [("", set()), ("\n", set()), ("5", {5}), ("0-2,8\n", {0, 1, 2, 8}), ("3-3,1", {1, 3})],
)
def test_lists_of_processors(listed: str, cpus: set[int]) -> None:
    assert parse_cpus(listed) == cpus


@given(st.sets(st.integers(0, 300)))
def test_lists_of_processors_are_read_as_the_kernel_writes_them(cpus: set[int]) -> None:
    assert parse_cpus(",".join(_runs(sorted(cpus))) + "\n") == cpus


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        yield f"{found[0]}-{found[-1]}" if len(found) > 1 else f"{found[0]}"


# ------------------------------------------------------------------------------------ blocks


@pytest.mark.parametrize(("count", "block_nbytes"), [(1, PAGE), (3, PAGE), (4, 3 * PAGE)])
def test_blocks_are_aligned_and_apart(count: int, block_nbytes: int) -> None:
    pool = BlockPool(count, block_nbytes, CpuDevice())
    blocks = [pool.take() for _ in range(count)]
    assert pool.nbytes == count * block_nbytes
    starts = sorted(block.tensor.data_ptr() for block in blocks)
    assert all(start % PAGE == 0 for start in starts)
    assert all(later - start >= block_nbytes for start, later in itertools.pairwise(starts))
    for number, block in enumerate(blocks):
        assert len(block.buffer) == block.tensor.numel() == block_nbytes
        block.buffer[:] = bytes([number + 1]) * block_nbytes
    for number, block in enumerate(blocks):
        assert bool((block.tensor == number + 1).all())
    pool.close()


def test_blocks_are_taken_and_given_back() -> None:
    pool = BlockPool(2, PAGE, CpuDevice())
    first, second = pool.take(), pool.take()
    with pytest.raises(IndexError):
        pool.take()
    pool.give(first)
    assert pool.take() is first
    pool.give_all()
    assert {id(pool.take()), id(pool.take())} == {id(first), id(second)}
    with pytest.raises(IndexError):
        pool.take()


def test_all_blocks_are_free_after_give_all_also_those_that_were() -> None:
    pool = BlockPool(3, PAGE, CpuDevice())
    pool.take()
    pool.give_all()
    assert len({id(pool.take()) for _ in range(3)}) == 3
    with pytest.raises(IndexError):
        pool.take()


def test_a_block_waits_for_its_copies_once() -> None:
    block = BlockPool(1, PAGE, CpuDevice()).take()
    waited: list[int] = []
    events: Any = tuple(
        SimpleNamespace(synchronize=lambda number=number: waited.append(number))
        for number in range(2)
    )
    block.busy_until = events
    block.wait_until_free()
    block.wait_until_free()
    assert waited == [0, 1]


@pytest.mark.usefixtures("small_parts")
def test_a_closed_pool_is_unlocked(cudart: FakeCudart) -> None:
    pool = BlockPool(4, PAGE, LockingDevice())
    assert sum(cudart.locked.values()) == 4 * PAGE
    pool.close()
    assert cudart.locked == {}
