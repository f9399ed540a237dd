"""Ranks that agree: what fails on one fails on all, and all go back to the same step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tierstore.backends.pinned import PinnedStore
from tierstore.backends.posix import PosixStore
from tierstore.config import TierConfig
from tierstore.device import CpuDevice
from tierstore.errors import (
    ConfigError,
    CorruptError,
    LayoutError,
    PeerError,
    StateError,
    TransferError,
)
from tierstore.ranks import Agreement, Alone
from tierstore.records import Identity
from tierstore.state import RankState
from tierstore.store import TierStore
from tierstore.stream import TileViews
from tierstore.testing.conformance import make_optimizer

WORLD = 3
NAMES = ("opt-0", "opt-1")


class Meeting:
    """Where the ranks of one process meet; each rank is a thread."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._said: list[Any] = [None] * size

    def all_of(self, rank: int, value: Any) -> list[Any]:
        try:
            self._barrier.wait()
            self._said[rank] = value
            self._barrier.wait()
            found = list(self._said)
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise PeerError("a rank did not come") from error
        return found

    def leave(self) -> None:
        self._barrier.abort()


class ThreadRanks:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def agree(self, step: int, *, failed: bool) -> Agreement:
        found = self._meeting.all_of(self._rank, (step, failed))
        steps = [step for step, _ in found]
        return Agreement(min(steps), max(steps), any(failed for _, failed in found))

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.all_of(self._rank, value)


class Job:
    """The ranks of a job, each with a store of its own and a call in a thread of its own."""

    def __init__(self, directory: Path, store_class: type[TierStore] = PosixStore) -> None:
        self.meeting = Meeting(WORLD)
        self.directory, self.store_class = directory, store_class
        self.states = self.each(self._make)

    def _make(self, rank: int) -> RankState:
        config = TierConfig(
            tier=self.store_class.tier, directories=(self.directory,), slots=2, timeout_s=30.0
        )
        identity = Identity(nonce="0badcafe", rank=rank)
        state = RankState(
            self.store_class(config, CpuDevice(), identity),
            [make_optimizer(name, 5000) for name in NAMES],
            dict,
            lambda counters: None,
            ThreadRanks(self.meeting, rank),
        )
        state.fill(dict.fromkeys(NAMES, numbered))
        return state

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(WORLD) as threads:
            return list(threads.map(call, range(WORLD)))

    def step(self) -> list[BaseException | None]:
        """One step of both optimizers on every rank; what each rank raised."""

        def advance(rank: int) -> BaseException | None:
            try:
                for name in NAMES:
                    self.states[rank].advance(name, doubled, lambda: None)
            except Exception as error:
                return error
            return None

        return self.each(advance)

    def rollback(self) -> None:
        self.each(lambda rank: self.states[rank].rollback())

    def expect(self, step: int) -> None:
        for state in self.states:
            assert state.step == step
            for name in NAMES:
                state.look(name, lambda views: expect_steps(views, step), range(5))

    def close(self) -> None:
        for state in self.states:
            state.close()


def numbered(views: TileViews) -> None:
    for number, values in enumerate(views.arrays.values()):
        start = views.tile.start + number
        values.copy_(torch.arange(start, start + len(values), dtype=torch.float32))


def doubled(views: TileViews) -> None:
    for values in views.arrays.values():
        values.mul_(2.0)


def expect_steps(views: TileViews, steps: int) -> None:
    for number, values in enumerate(views.arrays.values()):
        start = views.tile.start + number
        wanted = torch.arange(start, start + len(values), dtype=torch.float32) * 2.0**steps
        assert torch.equal(values, wanted)


def fail_once(store: TierStore, method: str, at: int = 1) -> None:
    """Let the `at`-th call of a method of one store fail."""
    real = getattr(store, method)
    calls = [0]

    def failing(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise TransferError(5, "this drive was told to fail")
        return real(*arguments)

    setattr(store, method, failing)


def test_alone_hears_itself() -> None:
    assert Alone().agree(7, failed=False) == Agreement(7, 7, False)
    assert Alone().agree(7, failed=True).failed
    assert Alone().gather({"a": 1}) == [{"a": 1}]


@pytest.mark.parametrize("at", [1, 9, 16, 30])  # in either optimizer of the chain
@pytest.mark.parametrize("rank", [0, 2])
def test_a_failed_write_on_one_rank_is_every_ranks_error(
    rank: int, at: int, tmp_path: Path
) -> None:
    job = Job(tmp_path)
    assert job.step() == [None] * WORLD
    fail_once(job.states[rank].store, "_write", at)
    found = job.step()
    assert type(found[rank]) is TransferError
    for other, error in enumerate(found):
        if other != rank:
            assert type(error) is PeerError
            assert "another rank failed" in str(error)
    # Nobody goes on before all have gone back.
    assert {type(error) for error in job.step()} == {StateError}
    job.rollback()
    job.expect(1)
    assert job.step() == [None] * WORLD
    job.expect(2)
    job.close()


@pytest.mark.parametrize("rank", range(WORLD))
def test_ranks_that_are_a_step_ahead_go_back_to_the_common_one(rank: int, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step()
    job.step()
    fail_once(job.states[rank].store, "_commit")
    found = job.step()
    assert type(found[rank]) is TransferError
    assert [state.step for state in job.states] == [2 if n == rank else 3 for n in range(WORLD)]
    job.rollback()
    job.expect(2)
    for _ in range(3):
        assert job.step() == [None] * WORLD
    job.expect(5)
    job.close()


@pytest.mark.parametrize("rank", range(WORLD))
def test_what_is_on_the_drive_after_going_back_is_the_common_step(
    rank: int, tmp_path: Path
) -> None:
    job = Job(tmp_path)
    job.step()
    fail_once(job.states[rank].store, "_commit")
    job.step()
    job.rollback()
    job.close()
    for number in range(WORLD):
        again = PosixStore(
            TierConfig(tier="nvme", directories=(tmp_path,)), CpuDevice(), Identity(nonce="x")
        )
        again.open(tmp_path / f"train-0badcafe/rank-{number:05d}")
        assert again.committed is not None
        assert again.committed.step == 1
        again.close()


def test_the_step_before_is_gone_once_it_is_written_over(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step()
    (state, *_) = job.states
    state.store.begin()
    with pytest.raises(StateError, match="step 0 is gone"):
        state.store.rollback(0)
    job.close()


def loading(job: Job, broken: int | None) -> list[type[BaseException] | None]:
    def visit(views: TileViews, rank: int) -> None:
        if rank == broken and views.tile.index == 2:
            raise CorruptError("this tile is damaged")
        numbered(views)

    def load(rank: int) -> type[BaseException] | None:
        visits = dict.fromkeys(NAMES, lambda views: visit(views, rank))
        try:
            job.states[rank].load(40, visits, {}, {"from": "elsewhere"})
        except Exception as error:
            return type(error)
        return None

    return job.each(load)


@pytest.mark.parametrize("store_class", [PosixStore, PinnedStore])
def test_what_one_rank_can_not_load_no_rank_has(
    store_class: type[TierStore], tmp_path: Path
) -> None:
    job = Job(tmp_path, store_class)
    job.step()
    assert loading(job, broken=1) == [PeerError, CorruptError, PeerError]
    assert {type(error) for error in job.step()} == {StateError}
    if store_class is PosixStore:
        job.rollback()
        job.expect(1)
        assert loading(job, broken=0) == [CorruptError, PeerError, PeerError]
    assert loading(job, broken=None) == [None] * WORLD
    for state in job.states:
        assert (state.step, state.job) == (40, {"from": "elsewhere"})
        state.look("opt-0", lambda views: expect_steps(views, 0), range(5))
    assert job.step() == [None] * WORLD
    job.close()


def test_a_step_that_was_taken_back_is_not_offered_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step()
    fail_once(job.states[1].store, "_commit")
    job.step()
    job.rollback()
    job.close()
    config = TierConfig(tier="nvme", directories=(tmp_path,))
    for rank in range(WORLD):
        (offer,) = PosixStore.offers(config, rank)
        assert offer.steps == (1,)


def test_ranks_of_chains_of_different_lengths_agree(tmp_path: Path) -> None:
    meeting, lengths = Meeting(2), (1, 2)
    states = []
    for rank, length in enumerate(lengths):
        config = TierConfig(tier="nvme", directories=(tmp_path,), slots=2)
        store = PosixStore(config, CpuDevice(), Identity(nonce="x", rank=rank))
        chain = [make_optimizer(name, 5000) for name in NAMES[:length]]
        ranks = ThreadRanks(meeting, rank)
        states.append(RankState(store, chain, dict, lambda found: None, ranks, max(lengths)))
        states[-1].fill(dict.fromkeys(NAMES[:length], numbered))

    def step(rank: int) -> type[BaseException] | None:
        try:
            for name in NAMES[: lengths[rank]]:
                states[rank].advance(name, doubled, lambda: None)
        except Exception as error:
            return type(error)
        return None

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(step, range(2))) == [None, None]
        fail_once(states[1].store, "_write", 20)
        assert list(threads.map(step, range(2))) == [PeerError, TransferError]
        list(threads.map(lambda state: state.rollback(), states))
        assert [state.step for state in states] == [1, 1]
        assert list(threads.map(step, range(2))) == [None, None]
    for state in states:
        state.close()


def test_a_step_is_kept_on_every_rank_or_on_none(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step()
    job.each(lambda rank: job.states[rank].freeze("one"))
    job.step()
    fail_once(job.states[2].store, "freeze")

    def refused(rank: int) -> type[BaseException]:
        with pytest.raises((PeerError, TransferError)) as raised:
            job.states[rank].freeze("two")
        return raised.type

    assert job.each(refused) == [PeerError, PeerError, TransferError]
    for state in job.states:
        assert {name: commit.step for name, commit in state.store.frozen().items()} == {"one": 1}
    for _ in range(3):
        assert job.step() == [None] * WORLD
    job.expect(5)
    job.close()


def test_memory_can_not_go_back(tmp_path: Path) -> None:
    job = Job(tmp_path, PinnedStore)
    job.step()
    fail_once(job.states[1].store, "_commit")
    assert [type(error) for error in job.step()] == [PeerError, TransferError, PeerError]

    def refused(rank: int) -> bool:
        with pytest.raises(StateError, match="load a checkpoint"):
            job.states[rank].rollback()
        return True

    assert all(job.each(refused))
    job.close()


def test_what_comes_before_the_first_tile_may_fail_as_well(tmp_path: Path) -> None:
    job = Job(tmp_path)

    def fail() -> None:
        raise ZeroDivisionError

    def advance(rank: int) -> type[BaseException]:
        prepare = fail if rank == 1 else lambda: None
        with pytest.raises((ZeroDivisionError, PeerError)) as raised:
            job.states[rank].advance("opt-0", doubled, lambda: None, prepare)
        return raised.type

    assert job.each(advance) == [PeerError, ZeroDivisionError, PeerError]
    job.rollback()
    job.expect(0)
    job.close()


def test_a_rank_that_is_gone_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.meeting.leave()
    assert {type(error) for error in job.step()} == {PeerError}
    job.close()


def make_state(directory: Path, rank: int = 0, **options: Any) -> RankState:
    config = TierConfig(tier="nvme", directories=(directory,), slots=2, **options)
    store = PosixStore(config, CpuDevice(), Identity(nonce="0badcafe", rank=rank))
    counters: dict[str, Any] = {"opt-0": {"steps": 1}}
    return RankState(store, [make_optimizer(numel=5000)], lambda: counters, lambda found: None)


def reopen(directory: Path, step: int | None = None, **layout: Any) -> RankState:
    config = TierConfig(tier="nvme", directories=(directory,), slots=2)
    store = PosixStore(config, CpuDevice(), Identity(nonce="other"))
    store.open(directory / "train-0badcafe/rank-00000", step=step)
    try:
        wanted = make_optimizer(**({"numel": 5000} | layout))
        return RankState(store, [wanted], dict, lambda found: None)
    except BaseException:
        store.close()
        raise


def trained(directory: Path, steps: int) -> None:
    state = make_state(directory)
    state.fill({"opt-0": numbered})
    for number in range(1, steps + 1):
        state.job = {"iteration": 10 * number}
        state.advance("opt-0", doubled, lambda: None)
    state.close()


@pytest.mark.parametrize("step", [None, 3, 2])
def test_a_run_goes_on_from_either_step_that_is_held(step: int | None, tmp_path: Path) -> None:
    trained(tmp_path, 3)
    state = reopen(tmp_path, step)
    held = 3 if step is None else step
    assert (state.step, state.job) == (held, {"iteration": 10 * held})
    for number in range(held, held + 4):
        state.look("opt-0", lambda views, n=number: expect_steps(views, n), range(5))  # type: ignore[misc]
        state.advance("opt-0", doubled, lambda: None)
    state.close()


def test_a_role_does_not_take_up_what_another_one_left(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    for role, count in (("train", 1), ("tra", 0), ("train-0badcafe", 0)):
        config = TierConfig(tier="nvme", directories=(tmp_path,), role=role)
        assert len(PosixStore.offers(config, 0)) == count
    store = PosixStore(
        TierConfig(tier="nvme", directories=(tmp_path,), role="train-2"),
        CpuDevice(),
        Identity(nonce="ab"),
    )
    store.allocate([make_optimizer()])
    offers = PosixStore.offers(TierConfig(tier="nvme", directories=(tmp_path,)), 0)
    assert [offer.nonce for offer in offers] == ["0badcafe"]
    store.close()


def test_taking_up_the_earlier_step_forgets_the_later_one(tmp_path: Path) -> None:
    trained(tmp_path, 3)
    reopen(tmp_path, 2).close()
    state = reopen(tmp_path)
    assert state.step == 2
    state.close()


def test_a_step_that_is_not_held_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, 3)
    with pytest.raises(StateError, match="holds step 3, and no whole step 1"):
        reopen(tmp_path, 1)
    reopen(tmp_path).close()


@pytest.mark.parametrize("layout", [{"numel": 5001}, {"tile_numel": 2048}, {"chunk_numel": 2048}])
def test_state_of_another_layout_is_refused(layout: dict[str, int], tmp_path: Path) -> None:
    trained(tmp_path, 1)
    with pytest.raises(LayoutError, match="another layout"):
        reopen(tmp_path, **layout)


def test_offers_say_what_could_be_taken_up(tmp_path: Path) -> None:
    config = TierConfig(tier="nvme", directories=(tmp_path,), slots=2)
    assert PosixStore.offers(config, 0) == []
    trained(tmp_path, 3)
    (offer,) = PosixStore.offers(config, 0)
    assert (offer.nonce, offer.steps, offer.problem) == ("0badcafe", (3, 2), "")
    assert offer.layouts == {"opt-0": make_optimizer(numel=5000).fingerprint}
    assert offer.layouts != {"opt-0": make_optimizer(numel=5001).fingerprint}
    assert PosixStore.offers(config, 1) == []
    assert PinnedStore.offers(TierConfig(tier="cpu"), 0) == []

    state = reopen(tmp_path)
    (offer,) = PosixStore.offers(config, 0)
    state.close()
    assert "in use" in offer.problem
    (tmp_path / "train-0badcafe/rank-00000/gen-a/opt-0/main/c/0").unlink()
    (offer,) = PosixStore.offers(config, 0)
    assert "missing" in offer.problem


def test_a_generation_that_is_being_written_is_not_offered(tmp_path: Path) -> None:
    state = make_state(tmp_path)
    state.fill({"opt-0": numbered})
    state.advance("opt-0", doubled, lambda: None)
    state.store.begin()
    # As a kill would leave it.
    state.store._resources.close()  # type: ignore[attr-defined]
    (offer,) = PosixStore.offers(TierConfig(tier="nvme", directories=(tmp_path,)), 0)
    assert offer.steps == (1,)


def test_a_record_that_is_not_one_is_corrupt(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    path = tmp_path / "train-0badcafe/rank-00000/gen-b/zarr.json"
    path.write_text(path.read_text().replace('"step": 1', '"step": "one"'))
    with pytest.raises(CorruptError, match="no readable record"):
        reopen(tmp_path)


def test_a_resume_mode_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="never, auto, require"):
        TierConfig(tier="nvme", resume="perhaps")
