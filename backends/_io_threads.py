"""Threads that carry transfers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["IoThreads"]

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
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
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

    def close(self) -> None:
        """Return when all tasks are done and the threads have ended."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
