"""Threads that carry transfers: order, errors, and how a process ends that did not close them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from tierstore.backends._io_threads import IoThreads, _close_all, _running


def test_all_calls_have_ended_when_an_error_is_raised() -> None:
    threads = IoThreads(2, "test")
    failed, gate = threading.Event(), threading.Event()
    ended: list[int] = []
    caught: list[BaseException] = []

    def work(item: int) -> None:
        if item == 0:
            failed.set()
            raise ValueError("the first")
        assert gate.wait(60)
        ended.append(item)

    def run() -> None:
        try:
            threads.run_all(work, range(6))
        except BaseException as error:
            caught.append(error)

    caller = threading.Thread(target=run)
    caller.start()
    assert failed.wait(60)
    assert caught == []
    gate.set()
    caller.join(60)
    assert sorted(ended) == [1, 2, 3, 4, 5]
    assert str(caught[0]) == "the first"
    threads.close()


def test_the_first_of_several_errors_is_raised() -> None:
    threads = IoThreads(1, "test")

    def work(item: int) -> None:
        if item % 3 == 2:
            raise ValueError(item)

    with pytest.raises(ValueError, match=r"^2$"):
        threads.run_all(work, range(9))
    threads.run_all(work, [0, 1])  # and the threads go on
    threads.close()


def test_what_is_no_exception_is_raised_in_the_caller_s_thread() -> None:
    threads = IoThreads(2, "test")

    def work(item: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        threads.run_all(work, range(4))
    threads.close()


def test_running_nothing_returns() -> None:
    threads = IoThreads(1, "test")
    threads.run_all(print, [])
    threads.close()


def test_one_thread_runs_its_tasks_in_order() -> None:
    threads = IoThreads(1, "test")
    ran: list[int] = []
    for number in range(1000):
        threads.submit(ran.append, number)
    threads.close()
    assert ran == list(range(1000))


def test_tasks_are_begun_in_order_by_several_threads() -> None:
    threads = IoThreads(3, "test")
    together = threading.Barrier(4)
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number // 3)
        together.wait(60)

    for number in range(9):
        threads.submit(work, number)
    for _ in range(3):
        together.wait(60)
    threads.close()
    assert begun == [0] * 3 + [1] * 3 + [2] * 3


def test_closing_does_what_was_submitted_and_ends_the_threads() -> None:
    threads = IoThreads(3, "test-close")
    ran: list[int] = []
    for number in range(300):
        threads.submit(ran.append, number)
    threads.close()
    assert sorted(ran) == list(range(300))
    assert [thread for thread in threading.enumerate() if "test-close" in thread.name] == []


def test_closing_twice_is_fine() -> None:
    threads = IoThreads(2, "test")
    threads.close()
    threads.close()
    assert threads not in _running


def test_closing_gives_a_thread_up_that_does_not_come_back() -> None:
    threads = IoThreads(1, "test-hang")
    gate = threading.Event()

    def hang() -> None:
        gate.wait(60)

    threads.submit(hang)
    threads.close(0.0)
    assert any(thread.name == "test-hang-0" for thread in threading.enumerate())
    gate.set()
    threads.close()


def test_a_task_is_forgotten_when_it_is_done() -> None:
    class Thing:
        pass

    threads = IoThreads(1, "test")
    gone = threading.Event()
    thing: Any = Thing()
    weakref.finalize(thing, gone.set)
    threads.submit(lambda thing: None, thing)
    del thing
    assert gone.wait(60)
    threads.close()


def test_only_these_threads_are_held_to_the_processors() -> None:
    own = os.sched_getaffinity(0)
    if len(own) < 2:
        pytest.skip("needs two processors")
    found: list[set[int]] = []
    bound = IoThreads(2, "test", {min(own)})
    free = IoThreads(1, "test")
    bound.run_all(lambda item: found.append(os.sched_getaffinity(0)), range(4))
    free.run_all(lambda item: found.append(os.sched_getaffinity(0)), range(1))
    bound.close()
    free.close()
    assert found == [{min(own)}] * 4 + [own]
    assert os.sched_getaffinity(0) == own


def test_the_end_of_the_process_closes_all_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    running, closed = IoThreads(1, "test"), IoThreads(1, "test")
    closed.close()
    asked: list[IoThreads] = []
    monkeypatch.setattr(IoThreads, "close", lambda self, timeout_s: asked.append(self))
    before = [threads for threads in _running if threads is not running]
    _close_all()
    assert running in asked
    assert closed not in asked
    assert len(asked) == len(before) + 1
    monkeypatch.undo()
    running.close()


# ---------------------------------------------------------------------- the end of the process

LEAVE = """
import sys, threading
from pathlib import Path
import torch
from tierstore.backends import _io_threads
from tierstore.backends.pinned import PinnedStore
from tierstore.backends.posix import PosixStore
from tierstore.config import TierConfig
from tierstore.device import CpuDevice
from tierstore.records import Identity
from tierstore.state import RankState
from tierstore.testing.conformance import make_optimizer

tier, way, directory = sys.argv[1:]
under_way = threading.Event()

class Slow(CpuDevice):
    slow = False

    def copy_in(self, dsts, srcs, after):
        done = super().copy_in(dsts, srcs, after)
        if self.slow:
            source = torch.zeros(2**22)
            target = torch.empty_like(source)
            under_way.set()
            for _ in range(20):  # in torch's C++ while the process ends
                target.copy_(source)
        return done

device = Slow()
store_class = {"cpu": PinnedStore, "nvme": PosixStore}[tier]
config = TierConfig(tier=tier, directories=(Path(directory),), slots=2, io_threads=2)
store = store_class(config, device, Identity(nonce="0badcafe"))
state = RankState(store, [make_optimizer()], dict, restore=lambda state: None)
state.fill({"opt-0": lambda views: None})

def finish():
    device.slow = way != "hang"  # what follows is the prefetch

state.advance("opt-0", lambda views: None, finish)
if way != "hang" and not under_way.wait(60):
    sys.exit("no transfer was under way")
if way == "exit":
    sys.exit(3)
if way == "error":
    raise ZeroDivisionError("of the trainer")
if way == "hang":
    _io_threads._EXIT_S = 0.05
    for threads in list(_io_threads._running):
        threads.submit(threading.Event().wait)
"""


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize(("way", "status"), [("return", 0), ("exit", 3), ("error", 1), ("hang", 0)])
def test_a_process_that_leaves_in_mid_transfer_ends_with_its_own_status(
    tier: str, way: str, status: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVE, tier, way, str(tmp_path / "store")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert "terminate called" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith(("Zero", "Fatal"))]
    assert said == (["ZeroDivisionError: of the trainer"] if way == "error" else [])
