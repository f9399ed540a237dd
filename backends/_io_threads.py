"""Threads that carry transfers."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["IoThreads"]

_EXIT_S = 5.0
"""Seconds that the end of the process waits for threads that are in a system call."""

_Task = tuple[Callable[..., None], tuple[Any, ...]]


class IoThreads:
    """A fixed number of threads that run tasks in order.

    Not ``ThreadPoolExecutor``: a KeyboardInterrupt in the middle of its ``submit`` can leave its
    locks held, and then every worker and the interpreter's exit wait for ever. A ``SimpleQueue``
    is written in C and has no such moment. Tasks report by their transfer, so no future is needed.

    Parameters
    ----------
    count
        How many threads.
    name
        Prefix of the threads' names.
    cpus
        The only processors that the threads may run on; None for any.
    """

    def __init__(self, count: int, name: str, cpus: set[int] | None = None) -> None:
        self._cpus = cpus
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()
        _running.add(self)

    def _work(self) -> None:
        if self._cpus is not None:
            os.sched_setaffinity(0, self._cpus)  # of the calling thread
        while (task := self._tasks.get()) is not None:
            function, arguments = task
            function(*arguments)
            # What a task refers to must not live until the next one comes.
            del task, function, arguments

    def submit(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a task that raises nothing in one of the threads."""
        self._tasks.put((function, arguments))

    def run_all(self, function: Callable[[Any], None], items: Iterable[Any]) -> None:
        """Call `function` for each item, several at once, and return when all calls have ended.

        Raises
        ------
        BaseException
            What the first failed call raised.
        """
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def call(item: Any) -> None:
            try:
                function(item)
            except BaseException as error:  # raised in the caller's thread
                ended.put(error)
            else:
                ended.put(None)

        count = 0
        for item in items:
            self.submit(call, item)
            count += 1
        failures = [error for error in (ended.get() for _ in range(count)) if error is not None]
        if failures:
            raise failures[0]

    def close(self, timeout_s: float | None = None) -> None:
        """Return when all tasks are done and the threads have ended, or the time is over."""
        _running.discard(self)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


_running: weakref.WeakSet[IoThreads] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A thread that comes back from torch's C++ while the interpreter is being taken down is ended
    # by force there, which C++ answers with std::terminate: the process would end with a core.
    end = time.monotonic() + _EXIT_S
    for threads in list(_running):
        threads.close(max(0.0, end - time.monotonic()))
