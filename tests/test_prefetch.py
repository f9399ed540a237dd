"""Prefetch: the next step's first tiles are read early, used once, and never when stale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_stream import doubled, equal, everything, expected, make_state, numbered, step
from tierstore.backends.pinned import PinnedStore
from tierstore.backends.posix import PosixStore
from tierstore.device import CpuDevice, Events, open_device
from tierstore.errors import CorruptError, TransferError, TransferTimeoutError
from tierstore.records import ArrayKey, Identity
from tierstore.state import RankState
from tierstore.store import TierStore
from tierstore.stream import StateStream
from tierstore.testing.conformance import tile_values, write_generation
from tierstore.testing.faults import delayed
from tierstore.transfer import Transfer

STORES = {
    "nvme": PosixStore,
    "cpu": PinnedStore,
    "nvme-late": delayed(PosixStore),
    "cpu-late": delayed(PinnedStore, seed=1),
}


def make_filled(
    directory: Path, store_class: type[TierStore] = PosixStore, **options: Any
) -> RankState:
    state = make_state(store_class, directory, **options)
    state.fill(dict.fromkeys(state.optimizers, numbered))
    return state


class Reads:
    """Counts the tiles that a store is asked for; breaks those that it is told to."""

    def __init__(self, store: TierStore) -> None:
        self.real, self.store = store._read_tile, store
        self.asked: list[tuple[str, int]] = []
        self.broken: dict[tuple[str, int], BaseException | None] = {}
        self.held: list[tuple[Transfer, Any]] = []
        store._read_tile = self  # type: ignore[method-assign]

    def __call__(
        self, keys: Sequence[ArrayKey], tile: int, outs: Mapping[str, torch.Tensor], after: Events
    ) -> Transfer:
        place = keys[0].optimizer, tile
        self.asked.append(place)
        if place not in self.broken:
            return self.real(keys, tile, outs, after)
        transfer = Transfer()
        error = self.broken.pop(place)
        if error is None:  # comes when the test lets it
            self.held.append((transfer, outs))
        else:
            transfer.fail(error)
        return transfer

    def take(self) -> list[tuple[str, int]]:
        asked, self.asked = self.asked, []
        return asked


def ahead(state: RankState) -> list[str]:
    """Names of the optimizers whose first tiles are in the window."""
    return [name for name, stream in state._streams.items() if stream._ahead is not None]


def window_is_free(state: RankState) -> bool:
    state.store.settle()
    return not ahead(state) and all(slot.free_after == () for slot in state.window.slots)


# ------------------------------------------------------------------------------------ is used


@pytest.mark.parametrize("store_class", STORES.values(), ids=STORES)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_tile_is_read_once_a_step_the_first_ones_early(
    store_class: type[TierStore], slots: int, tmp_path: Path
) -> None:
    state = make_filled(tmp_path, store_class, slots=slots)
    reads = Reads(state.store)
    tiles = {
        name: [(name, tile) for tile in range(entry.layout.n_tiles)]
        for name, entry in state.optimizers.items()
    }
    step(state)
    early = {name: entry[:slots] for name, entry in tiles.items()}
    assert reads.take() == tiles["opt-0"] + tiles["opt-1"] + early["opt-0"]
    for _ in range(2):
        assert ahead(state) == ["opt-0"]
        state.advance("opt-0", doubled, lambda: None)
        assert ahead(state) == ["opt-1"]
        assert reads.take() == tiles["opt-0"][slots:] + early["opt-1"]
        state.advance("opt-1", doubled, lambda: None)
        assert reads.take() == tiles["opt-1"][slots:] + early["opt-0"]
    assert equal(everything(state), expected(state, 3))
    state.close()


def test_a_sweep_that_was_begun_early_is_counted_whole(tmp_path: Path) -> None:
    state = make_filled(tmp_path)
    found = []
    for _ in range(2):
        step(state)
        assert state.last is not None
        found.append((state.last.tiles, state.last.read_nbytes, state.last.peak_tiles))
    tiles = sum(entry.layout.n_tiles for entry in state.optimizers.values())
    assert found[0] == found[1]
    assert found[0][0] == tiles
    assert found[0][2] <= 2
    state.close()


def test_prefetching_twice_reads_once(tmp_path: Path) -> None:
    state = make_filled(tmp_path)
    reads = Reads(state.store)
    stream = state._streams["opt-0"]
    stream.prefetch()
    stream.prefetch()
    assert reads.take() == [("opt-0", 0), ("opt-0", 1)]
    state.close()


@pytest.mark.parametrize("store_class", STORES.values(), ids=STORES)
@pytest.mark.parametrize("recovery", ["step", "none"])
def test_results_are_those_of_a_run_without_prefetch(
    store_class: type[TierStore], recovery: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for way in ("with", "without"):
        if way == "without":
            monkeypatch.setattr(StateStream, "prefetch", lambda self: None)
        state = make_filled(tmp_path / way, store_class, recovery=recovery, slots=3)
        for _ in range(3):
            step(state)
        found.append(everything(state))
        state.close()
    assert equal(*found)
    assert equal(found[0], expected(state, 3))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("store_class", STORES.values(), ids=STORES)
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_steps_on_cuda_that_nothing_comes_between(
    store_class: type[TierStore], slots: int, tmp_path: Path
) -> None:
    state = make_state(store_class, tmp_path, open_device(torch.device("cuda")), slots=slots)
    state.fill(dict.fromkeys(state.optimizers, numbered))
    for _ in range(6):
        step(state)
    assert equal(everything(state), expected(state, 6))
    state.close()


def test_the_time_between_two_steps_is_not_the_transfer_s(tmp_path: Path) -> None:
    state = make_filled(tmp_path)
    step(state)
    run = state._streams["opt-0"]._ahead
    assert run is not None
    state.store.settle()
    for transfer in run._deadlines:
        run._deadlines[transfer] = 0.0  # as if the trainer had computed for hours
    step(state)
    assert equal(everything(state), expected(state, 2))
    state.close()


# ------------------------------------------------------------------------------------ is dropped


def test_looking_drops_it_and_frees_the_window(tmp_path: Path) -> None:
    state = make_filled(tmp_path, delayed(PosixStore))
    step(state)
    seen: list[list[str]] = []
    state.look("opt-1", lambda views: seen.append(ahead(state)), [0, 1])
    assert seen == [[], []]
    assert ahead(state) == []
    assert equal(everything(state), expected(state, 1))
    step(state)
    assert equal(everything(state), expected(state, 2))
    state.close()


def test_rewriting_drops_it_and_what_was_rewritten_counts(tmp_path: Path) -> None:
    state = make_filled(tmp_path, delayed(PosixStore))
    step(state)
    reads = Reads(state.store)
    state.rewrite(dict.fromkeys(state.optimizers, numbered))
    assert ahead(state) == []
    assert Counter(reads.take())["opt-0", 0] == 1  # again, not the one from before
    step(state)
    assert equal(everything(state), expected(state, 1))
    state.close()


def test_rolling_back_drops_it_and_frees_the_window(tmp_path: Path) -> None:
    state = make_filled(tmp_path, delayed(PosixStore))
    step(state)
    state.advance("opt-0", doubled, lambda: None)
    assert ahead(state) == ["opt-1"]
    state.rollback()
    assert window_is_free(state)
    assert equal(everything(state), expected(state, 1))
    step(state)
    assert equal(everything(state), expected(state, 2))
    state.close()


def test_the_step_of_another_optimizer_drops_it(tmp_path: Path) -> None:
    state = make_filled(tmp_path, delayed(PosixStore))
    step(state)
    assert ahead(state) == ["opt-0"]
    state.advance("opt-1", doubled, lambda: None)
    assert ahead(state) == ["opt-0"]  # the one after opt-1, and of the same commit
    state.advance("opt-0", doubled, lambda: None)
    assert equal(everything(state), expected(state, 2))
    state.close()


def test_dropping_waits_until_nothing_comes_into_the_window(tmp_path: Path) -> None:
    state = make_filled(tmp_path, delayed(PosixStore))
    stream = state._streams["opt-0"]
    stream.prefetch()
    event: Any = object()
    for slot in state.window.slots:
        slot.free_after = (event,)  # of a stream that has come to its end
    stream.drop()
    assert state.store._on_their_way == 0
    assert window_is_free(state)
    stream.drop()
    state.close()


@pytest.mark.parametrize("options", [{"order": [0, 1]}, {"reads": False}, {"writes": False}])
def test_sweeps_of_another_kind_do_not_use_it(options: dict[str, Any], tmp_path: Path) -> None:
    state = make_filled(tmp_path)
    reads = Reads(state.store)
    stream = state._streams["opt-0"]
    stream.prefetch()
    reads.take()
    if options.get("writes", True):
        state.store.begin()
    seen: list[int] = []
    stream.sweep(lambda views: seen.append(views.tile.index), **options)
    tiles = options.get("order", range(state.optimizers["opt-0"].layout.n_tiles))
    assert sorted(seen) == list(tiles)
    assert len(reads.take()) == (len(seen) if options.get("reads", True) else 0)
    assert ahead(state) == []
    state.close()


def test_what_was_read_of_an_older_commit_is_not_used(tmp_path: Path) -> None:
    state = make_filled(tmp_path)
    state._streams["opt-0"].prefetch()
    write_generation(state.store, 5)
    reads = Reads(state.store)
    seen: dict[tuple[int, str], bytes] = {}

    def look(views: Any) -> None:
        for name, view in views.arrays.items():
            seen[views.tile.index, name] = view.view(torch.uint8).numpy().tobytes()

    state.store.begin()
    state._streams["opt-0"].sweep(look)
    entry = state.optimizers["opt-0"]
    assert reads.take() == [("opt-0", tile) for tile in range(entry.layout.n_tiles)]
    for (tile, name), found in seen.items():
        wanted = tile_values(entry, ArrayKey("opt-0", name), tile, 5)[
            : entry.layout.tile(tile).numel
        ]
        assert found == wanted.view(torch.uint8).numpy().tobytes()
    state.close()


# ------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("store_class", [PosixStore, delayed(PosixStore)], ids=["nvme", "late"])
def test_a_read_error_is_raised_by_the_next_step_and_the_last_one_is_whole(
    store_class: type[TierStore], tmp_path: Path
) -> None:
    state = make_filled(tmp_path, store_class)
    step(state)
    reads = Reads(state.store)
    reads.broken["opt-0", 1] = TransferError(5, "this drive was told to fail")
    state._streams["opt-0"].drop()
    state._streams["opt-0"].prefetch()
    state.store.settle()
    assert state.step == 1
    with pytest.raises(TransferError, match="told to fail"):
        step(state)
    state.rollback()
    assert state.step == 1
    assert equal(everything(state), expected(state, 1))
    step(state)
    assert equal(everything(state), expected(state, 2))
    state.close()


def test_a_flipped_bit_in_a_tile_read_early_is_raised_by_the_next_step(tmp_path: Path) -> None:
    state = make_filled(tmp_path)
    step(state)
    state._streams["opt-0"].drop()
    store = state.store
    assert isinstance(store, PosixStore)
    assert store._current is not None
    path = store.path / store._current / "opt-0/main/c/0"
    offset = state.optimizers["opt-0"].formats["main"].tile_offset(0) + 5
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    state._streams["opt-0"].prefetch()
    with pytest.raises(CorruptError, match="tile 0 of opt-0/main"):
        step(state)
    state.rollback()
    state.close()


def test_a_tile_that_arrived_and_then_failed_its_check_is_an_error(tmp_path: Path) -> None:
    state = make_filled(tmp_path)
    step(state)
    reads = Reads(state.store)
    reads.broken["opt-0", 0] = None
    state._streams["opt-0"].drop()
    state._streams["opt-0"].prefetch()
    ((transfer, _),) = reads.held
    transfer.device_done.set_result(())
    transfer.settled.set_exception(CorruptError("this drive was told to fail"))
    with pytest.raises(CorruptError, match="told to fail"):
        step(state)
    state.rollback()
    assert equal(everything(state), expected(state, 1))
    state.close()


def test_dropping_swallows_a_read_error(tmp_path: Path) -> None:
    state = make_filled(tmp_path)
    reads = Reads(state.store)
    reads.broken["opt-0", 0] = TransferError(5, "this drive was told to fail")
    state._streams["opt-0"].prefetch()
    assert equal(everything(state), expected(state, 0))
    step(state)
    assert equal(everything(state), expected(state, 1))
    state.close()


def test_an_error_in_the_middle_of_a_step_leaves_nothing_of_it(tmp_path: Path) -> None:
    state = make_filled(tmp_path, delayed(PosixStore))
    step(state)

    def fail(views: Any) -> None:
        raise ZeroDivisionError("in the update")

    with pytest.raises(ZeroDivisionError):
        state.advance("opt-0", fail, lambda: None)
    assert ahead(state) == []
    state.rollback()
    step(state)
    assert equal(everything(state), expected(state, 2))
    state.close()


@pytest.mark.parametrize("way", ["look", "another"])
def test_a_window_that_a_hanging_read_may_still_fill_is_not_used(way: str, tmp_path: Path) -> None:
    """Such a read can come back in the middle of what the window is used for next."""
    state = make_filled(tmp_path, timeout_s=0.2)
    step(state)
    reads = Reads(state.store)
    reads.broken["opt-0", 0] = None
    state._streams["opt-0"].drop()
    state._streams["opt-0"].prefetch()
    ((transfer, outs),) = reads.held
    visited: list[int] = []

    def visit(views: Any) -> None:
        visited.append(views.tile.index)
        if not transfer.settled.done():  # it comes now
            for out in outs.values():
                out.zero_()
            transfer.device_done.set_result(())
            transfer.settled.set_result(None)

    def use_the_window() -> None:
        if way == "look":
            state.look("opt-0", visit, range(state.optimizers["opt-0"].layout.n_tiles))
        else:
            state.advance("opt-1", visit, lambda: None)

    try:
        for _ in range(2):
            with pytest.raises(TransferTimeoutError, match="did not come back"):
                use_the_window()
            assert visited == []
    finally:
        if not transfer.settled.done():
            transfer.device_done.set_result(())
            transfer.settled.set_result(None)
        state.close()


# ------------------------------------------------------------------------------------ the end


@pytest.mark.parametrize("store_class", STORES.values(), ids=STORES)
@pytest.mark.parametrize("discard", [False, True])
def test_closing_waits_for_what_is_on_its_way(
    store_class: type[TierStore], discard: bool, tmp_path: Path
) -> None:
    state = make_filled(tmp_path, store_class)
    step(state)
    assert ahead(state) == ["opt-0"]
    state.close(discard=discard)
    assert state.store._on_their_way == 0
    assert any(tmp_path.iterdir()) == (state.store.capabilities.durable and not discard)


@pytest.mark.parametrize("recovery", ["step", "none"])
def test_what_was_closed_in_mid_prefetch_opens_again(recovery: str, tmp_path: Path) -> None:
    state = make_filled(tmp_path, delayed(PosixStore), recovery=recovery)
    step(state)
    state.close()
    again = PosixStore(state.store.config, CpuDevice(), Identity(nonce="again"))
    again.open(tmp_path / "train-0badcafe" / "rank-00000")
    assert again.committed is not None
    assert again.committed.step == 1
    again.close()


def test_closing_says_nothing_of_a_read_that_failed(tmp_path: Path) -> None:
    state = make_filled(tmp_path)
    reads = Reads(state.store)
    reads.broken["opt-0", 0] = TransferError(5, "this drive was told to fail")
    state._streams["opt-0"].prefetch()
    state.close()
    assert state.store._on_their_way == 0


# ------------------------------------------------------------------------------------ any order


@given(
    st.lists(st.sampled_from(["step", "turned", "look", "rewrite", "half"]), max_size=8),
    st.sampled_from(["step", "none"]),
    st.integers(1, 4),
)
@settings(max_examples=25)
def test_whatever_comes_between_steps_they_compute_the_same(
    tmp_path_factory: pytest.TempPathFactory, calls: list[str], recovery: str, slots: int
) -> None:
    directory = tmp_path_factory.mktemp("state")
    state = make_filled(directory, slots=slots, recovery=recovery)
    steps = 0
    for call in calls:
        if call == "step":
            step(state)
        elif call == "turned":
            for name in reversed(state.optimizers):
                state.advance(name, doubled, lambda: None)
        elif call == "look":
            state.look("opt-1", lambda views: None, [1, 0])
        elif call == "rewrite":
            state.rewrite({"opt-0": lambda views: None})
        elif recovery == "step":
            state.advance("opt-0", doubled, lambda: None)
            state.rollback()
        steps += call in ("step", "turned")
    assert state.step == steps
    assert equal(everything(state), expected(state, steps))
    state.close(discard=True)
