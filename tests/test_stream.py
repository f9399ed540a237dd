"""The sweep: nothing skipped, nothing swapped, nothing early; errors, deadlines, bounded memory."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tierstore.backends.gds import GdsStore
from tierstore.backends.pinned import PinnedStore
from tierstore.backends.posix import PosixStore
from tierstore.config import TierConfig
from tierstore.device import CpuDevice, Events, open_device
from tierstore.errors import StateError, TransferError, TransferTimeoutError
from tierstore.records import ArrayKey, Identity
from tierstore.state import RankState
from tierstore.store import TierStore
from tierstore.stream import TileViews, _Sweep
from tierstore.testing.conformance import make_optimizer
from tierstore.testing.faults import delayed
from tierstore.transfer import Transfer

STORES = [PosixStore, PinnedStore, delayed(PosixStore), delayed(PinnedStore, seed=1)]
IDS = ["nvme", "cpu", "nvme-late", "cpu-late"]


def make_state(
    store_class: type[TierStore], directory: Path, device: Any = None, **options: Any
) -> RankState:
    options = {"slots": 2, "timeout_s": 60.0, **options}
    config = TierConfig(tier=store_class.tier, directories=(directory,), **options)
    store = store_class(config, device or CpuDevice(), Identity(nonce="0badcafe"))
    optimizers = [
        make_optimizer(numel=30_000, chunk_numel=4096),
        make_optimizer("opt-1", 2500, tile_numel=2048),
    ]
    return RankState(store, optimizers, dict, restore=lambda state: None)


def numbered(views: TileViews) -> None:
    """Give every element a value of its own in every array."""
    for index, view in enumerate(views.arrays.values()):
        start = views.tile.start + index * 100_000
        view.copy_(torch.arange(start, start + view.numel(), dtype=torch.float32))


def doubled(views: TileViews) -> None:
    """An update in which every array depends on all of them, and which does not commute."""
    main, first, second = views.arrays.values()
    first.mul_(2.0).add_(main)
    second.sub_(first)
    main.add_(second, alpha=0.25)


def everything(state: RankState) -> dict[str, list[torch.Tensor]]:
    found: dict[str, list[torch.Tensor]] = {}
    for name, optimizer in state.optimizers.items():
        found[name] = [torch.zeros(optimizer.layout.numel) for _ in optimizer.arrays]

        def take(views: TileViews, name: str = name) -> None:
            stop = views.tile.start + views.tile.numel
            for whole, view in zip(found[name], views.arrays.values(), strict=True):
                whole[views.tile.start : stop] = view.cpu()

        state.look(name, take, range(optimizer.layout.n_tiles))
    return found


def expected(state: RankState, steps: int) -> dict[str, list[torch.Tensor]]:
    wanted = {}
    for name, optimizer in state.optimizers.items():
        whole = optimizer.layout.numel
        arrays = {key: torch.zeros(whole) for key in optimizer.arrays}
        tile = optimizer.layout.tile(0)
        numbered(TileViews(tile, arrays))
        for _ in range(steps):
            doubled(TileViews(tile, arrays))
        wanted[name] = list(arrays.values())
    return wanted


def equal(found: dict[str, list[torch.Tensor]], wanted: dict[str, list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(one, other)
        for name in wanted
        for one, other in zip(found[name], wanted[name], strict=True)
    )


def step(state: RankState, visit: Callable[[TileViews], None] = doubled) -> None:
    for name in state.optimizers:
        state.advance(name, visit, lambda: None)


@pytest.mark.parametrize("store_class", STORES, ids=IDS)
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_sweeps_compute_what_resident_state_would(
    store_class: type[TierStore], slots: int, tmp_path: Path
) -> None:
    state = make_state(store_class, tmp_path, slots=slots)
    state.fill(dict.fromkeys(state.optimizers, numbered))
    for steps in range(1, 4):
        step(state)
        assert equal(everything(state), expected(state, steps))
    nbytes = sum(
        optimizer.layout.n_tiles * optimizer.layout.tile_numel * 12
        for optimizer in state.optimizers.values()
    )
    assert (state.step, state.sweeps) == (3, 6)
    assert state.total.read_nbytes == state.total.written_nbytes == 3 * nbytes
    assert state.total.peak_tiles <= slots
    state.close()


@pytest.mark.parametrize("host_sets", [2, 3])
def test_the_least_host_memory_still_makes_progress(host_sets: int, tmp_path: Path) -> None:
    set_nbytes = 3 * (2048 * 4 + 4096)
    state = make_state(
        delayed(PosixStore), tmp_path, slots=3, host_memory_nbytes=host_sets * set_nbytes
    )
    state.fill(dict.fromkeys(state.optimizers, numbered))
    step(state)
    assert equal(everything(state), expected(state, 1))
    state.close()


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_tiles_gives_the_same(seed: int, tmp_path: Path) -> None:
    state = make_state(delayed(PinnedStore, seed=seed), tmp_path, slots=3)
    state.fill(dict.fromkeys(state.optimizers, numbered))
    state.store.begin()
    for name, optimizer in state.optimizers.items():
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(optimizer.layout.n_tiles, generator=generator).tolist()
        state._streams[name].sweep(doubled, order=order)
    state.store.commit(1, {})
    assert equal(everything(state), expected(state, 1))
    state.close()


class _Broken:
    """Wraps a store's `_read` or `_write` after the state was filled."""

    def __init__(self, store: TierStore, name: str) -> None:
        self.real = getattr(store, name)
        self.store = store
        setattr(store, name, self)

    def done(self) -> Transfer:
        transfer = Transfer()
        transfer.device_done.set_result(())
        transfer.settled.set_result(None)
        return transfer


class _SwapReads(_Broken):
    def __call__(self, key: ArrayKey, tile: int, out: torch.Tensor, after: Events) -> Transfer:
        if key.optimizer == "opt-0":
            tile = {1: 2, 2: 1}.get(tile, tile)
        transfer: Transfer = self.real(key, tile, out, after)
        return transfer


class _SkipWrite(_Broken):
    def __call__(self, key: ArrayKey, tile: int, src: torch.Tensor, after: Events) -> Transfer:
        if tile == 1 and key.name == "exp_avg":
            return self.done()
        transfer: Transfer = self.real(key, tile, src, after)
        return transfer


class _EarlyRead(_Broken):
    def __call__(self, key: ArrayKey, tile: int, out: torch.Tensor, after: Events) -> Transfer:
        late: Transfer = self.real(key, tile, out, after)
        early = Transfer()
        early.device_done.set_result(())
        late.settled.add_done_callback(lambda future: early.settled.set_result(None))
        return early


class _EarlyRelease(_Broken):
    def __call__(self, key: ArrayKey, tile: int, src: torch.Tensor, after: Events) -> Transfer:
        late: Transfer = self.real(key, tile, src, after)
        early = Transfer()
        early.device_done.set_result(())
        late.settled.add_done_callback(lambda future: early.settled.set_result(None))
        return early


@pytest.mark.parametrize(
    ("broken", "method"),
    [
        (_SwapReads, "_read"),
        (_SkipWrite, "_write"),
        (_EarlyRead, "_read"),
        (_EarlyRelease, "_write"),
    ],
)
def test_these_tests_see_a_broken_stream(
    broken: type[_Broken], method: str, tmp_path: Path
) -> None:
    state = make_state(delayed(PinnedStore), tmp_path, slots=2)
    state.fill(dict.fromkeys(state.optimizers, numbered))
    broken(state.store, method)
    step(state)
    step(state)
    monkey = state.store
    monkey.__dict__.pop(method)
    assert not equal(everything(state), expected(state, 2))
    state.close()


class _FailingWrite(_Broken):
    failures = 1

    def __call__(self, key: ArrayKey, tile: int, src: torch.Tensor, after: Events) -> Transfer:
        if tile == 3 and self.failures:
            self.failures -= 1
            transfer = Transfer()
            transfer.fail(TransferError(5, "this drive was told to fail"))
            return transfer
        real: Transfer = self.real(key, tile, src, after)
        return real


def test_an_error_in_a_sweep_keeps_the_last_step(tmp_path: Path) -> None:
    state = make_state(delayed(PosixStore), tmp_path, slots=3)
    state.fill(dict.fromkeys(state.optimizers, numbered))
    step(state)
    _FailingWrite(state.store, "_write")
    with pytest.raises(TransferError, match="told to fail"):
        step(state)
    with pytest.raises(StateError, match="told to fail"):
        state.store.begin()
    state.rollback()
    assert state.step == 1
    assert equal(everything(state), expected(state, 1))
    step(state)
    assert equal(everything(state), expected(state, 2))
    state.close()


def test_an_error_of_the_visit_is_raised_as_it_is(tmp_path: Path) -> None:
    state = make_state(delayed(PosixStore), tmp_path)
    state.fill(dict.fromkeys(state.optimizers, numbered))

    def fail(views: TileViews) -> None:
        if views.tile.index == 2:
            raise ZeroDivisionError("in the update")

    with pytest.raises(ZeroDivisionError):
        step(state, fail)
    state.rollback()
    assert equal(everything(state), expected(state, 0))
    state.close()


def test_the_cpu_tier_can_not_go_back(tmp_path: Path) -> None:
    state = make_state(delayed(PinnedStore), tmp_path)
    state.fill(dict.fromkeys(state.optimizers, numbered))
    _FailingWrite(state.store, "_write")
    with pytest.raises(TransferError):
        step(state)
    with pytest.raises(StateError, match="load a checkpoint"):
        state.rollback()
    state.close()


class _Hanging(_Broken):
    def __call__(self, key: ArrayKey, tile: int, out: torch.Tensor, after: Events) -> Transfer:
        transfer: Transfer = Transfer() if tile == 2 else self.real(key, tile, out, after)
        return transfer


@pytest.mark.parametrize("method", ["_read", "_write"])
def test_a_transfer_that_never_ends_is_an_error(method: str, tmp_path: Path) -> None:
    state = make_state(PosixStore, tmp_path, timeout_s=0.2)
    state.fill(dict.fromkeys(state.optimizers, numbered))
    _Hanging(state.store, method)
    with pytest.raises(TransferTimeoutError, match="did not come back within"):
        step(state)
    # Nothing may use its slot or block again while it can still come back.
    with pytest.raises(TransferTimeoutError, match="did not come back within"):
        state.rollback()
    with pytest.raises(TransferTimeoutError, match="did not come back within"):
        state.close()


def test_optimizers_of_a_chain_step_together(tmp_path: Path) -> None:
    state = make_state(PinnedStore, tmp_path)
    state.fill(dict.fromkeys(state.optimizers, numbered))
    state.advance("opt-0", doubled, lambda: None)
    with pytest.raises(StateError, match="opt-1 has not stepped yet"):
        state.advance("opt-0", doubled, lambda: None)
    with pytest.raises(StateError, match="in between"):
        state.look("opt-0", doubled, [0])
    state.close()


def test_rewriting_carries_over_what_nobody_changes(tmp_path: Path) -> None:
    state = make_state(delayed(PosixStore), tmp_path)
    state.fill(dict.fromkeys(state.optimizers, numbered))
    state.rewrite({"opt-1": doubled})
    found = everything(state)
    assert equal({"opt-0": found["opt-0"]}, {"opt-0": expected(state, 0)["opt-0"]})
    assert equal({"opt-1": found["opt-1"]}, {"opt-1": expected(state, 1)["opt-1"]})
    assert state.step == 0
    state.close()


MEASURE = """
import sys
from pathlib import Path
import torch
from tierstore.backends.posix import PosixStore
from tierstore.config import TierConfig
from tierstore.device import CpuDevice
from tierstore.state import RankState
from tierstore.records import Identity
from tierstore.testing.conformance import make_optimizer

config = TierConfig(tier="nvme", directories=(Path(sys.argv[1]),), slots=3, recovery="none")
store = PosixStore(config, CpuDevice(), Identity(nonce="0badcafe"))
optimizer = make_optimizer(numel=int(sys.argv[2]), tile_numel=65536, chunk_numel=4 * 65536)
state = RankState(store, [optimizer], dict, restore=lambda state: None)
state.fill({"opt-0": lambda views: None})

def peak_nbytes(reset):
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

before = peak_nbytes(reset=True)
for _ in range(2):
    state.advance("opt-0", lambda views: views.arrays["main"].add_(1.0), lambda: None)
print(state.window.nbytes, store.host_nbytes, peak_nbytes(reset=False) - before)
"""


def test_memory_of_a_sweep_does_not_grow_with_the_state(tmp_path: Path) -> None:
    found = []
    for times in (1, 8):
        numel = times * 2**20
        command = [sys.executable, "-c", MEASURE, str(tmp_path / str(times)), str(numel)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append([int(word) for word in done.stdout.split()])
    (window, host, growth), (larger_window, larger_host, larger_growth) = found
    assert (window, host) == (larger_window, larger_host)
    # The state itself is 12 MiB and 96 MiB.
    assert larger_growth < growth + 4 * 2**20


def require_cuda(store_class: type[TierStore]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if issubclass(store_class, GdsStore):
        pytest.importorskip("kvikio", reason="the gds tier needs kvikio")


@pytest.mark.cuda
@pytest.mark.parametrize(
    "store_class", [*STORES, GdsStore, delayed(GdsStore)], ids=[*IDS, "gds", "gds-late"]
)
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_sweeps_on_cuda(store_class: type[TierStore], slots: int, tmp_path: Path) -> None:
    require_cuda(store_class)
    device = open_device(torch.device("cuda"))
    state = make_state(store_class, tmp_path, device, slots=slots)

    def numbered_there(views: TileViews) -> None:
        on_host = {name: view.cpu() for name, view in views.arrays.items()}
        numbered(TileViews(views.tile, on_host))
        for name, view in views.arrays.items():
            view.copy_(on_host[name])

    state.fill(dict.fromkeys(state.optimizers, numbered_there))
    for steps in range(1, 6):
        step(state)
        assert equal(everything(state), expected(state, steps))
    state.close()


@pytest.mark.cuda
@pytest.mark.parametrize("store_class", [PosixStore, PinnedStore, GdsStore])
def test_device_memory_does_not_grow_with_the_state(
    store_class: type[TierStore], tmp_path: Path
) -> None:
    require_cuda(store_class)
    peaks = []
    for times, number in zip((1, 8), itertools.count()):
        device = open_device(torch.device("cuda"))
        config = TierConfig(tier=store_class.tier, directories=(tmp_path / str(number),), slots=3)
        store = store_class(config, device, Identity(nonce="0badcafe"))
        optimizer = make_optimizer(numel=times * 2**22, tile_numel=2**18, chunk_numel=2**20)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        state = RankState(store, [optimizer], dict, restore=lambda state: None)
        state.fill({"opt-0": lambda views: None})
        for _ in range(2):
            step(state)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        state.close()
    assert peaks[0] == peaks[1]
    assert peaks[0] <= 3 * 2**18 * 12 + 2**20


def test_transfers_are_gone_without_a_garbage_collection(tmp_path: Path) -> None:
    """Trainers switch the collection off; whatever a step leaves behind would pile up."""
    state = make_state(PosixStore, tmp_path)
    state.fill(dict.fromkeys(state.optimizers, numbered))
    gc.collect()
    gc.disable()
    try:
        step(state)
        state.store.settle()
        left = [thing for thing in gc.get_objects() if type(thing) is Transfer]
    finally:
        gc.enable()
    # One of the last tile may still be in the hands of an I/O thread.
    assert len(left) <= 2 * state.store.config.io_threads
    state.close()


def test_a_report_that_comes_late_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _Sweep._report

    def late(self: _Sweep, handle: Any, number: int, future: Any) -> None:
        if handle.__name__ == "_settled":
            time.sleep(0.002)
        real(self, handle, number, future)

    monkeypatch.setattr(_Sweep, "_report", late)
    state = make_state(PinnedStore, tmp_path)
    state.fill(dict.fromkeys(state.optimizers, numbered))
    step(state)
    assert equal(everything(state), expected(state, 1))
    state.close()


def test_rollback_gives_the_counters_of_the_step_back(tmp_path: Path) -> None:
    state = make_state(PosixStore, tmp_path)
    restored: list[Any] = []
    state._counters, state._restore = lambda: {"steps": state.step + 1}, restored.append
    state.fill(dict.fromkeys(state.optimizers, numbered))
    step(state)
    _FailingWrite(state.store, "_write")
    with pytest.raises(TransferError):
        step(state)
    state.rollback()
    assert restored == [{"steps": 1}]
    state.close()
