"""Runs cases in groups of processes, one process a rank, and never waits for one without end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_cases import Build, Case

START_TIMEOUT_S = 180.0
# How long the other ranks may take to say why they failed, once one has.
FAREWELL_S = 5.0
LOG_TAIL_NBYTES = 6000

_HERE = Path(__file__).resolve().parent


class GroupFailureError(Exception):
    """A rank failed, died or hung; the message has what every rank left behind."""


@dataclass
class Rank:
    """A process of a group, and what it says."""

    process: subprocess.Popen[str]
    log: Path
    replies: IO[bytes]
    received: bytes = b""


class WorkerGroup:
    """The processes of one world, which run any number of cases one after the other.

    Parameters
    ----------
    build, world_size
        What the processes run.
    directory
        An empty directory for the rendezvous and the logs.
    """

    def __init__(self, build: Build, world_size: int, directory: Path) -> None:
        self.key = build, world_size
        self._directory = directory
        self._ranks: list[Rank] = []
        try:
            for rank in range(world_size):
                self._ranks.append(self._start(build, rank, world_size))
            self._collect(START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    def run(self, case: Case, directory: Path) -> list[dict[str, Any]]:
        """Run a case on all ranks and return the result of each.

        Raises
        ------
        GroupFailureError
            The group is of no more use then, and is killed.
        """
        request = json.dumps({"case": dataclasses.asdict(case), "directory": str(directory)})
        try:
            for rank in self._ranks:
                _pipe(rank.process.stdin).write(request + "\n")
                _pipe(rank.process.stdin).flush()
            return self._collect(case.timeout_s)
        except OSError as error:
            raise self._failure(f"a rank is gone: {error}", {}) from error

    def close(self) -> None:
        """Let the processes end by themselves, or kill them."""
        for rank in self._ranks:
            _pipe(rank.process.stdin).close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for rank in self._ranks:
                rank.process.wait(FAREWELL_S)
        self.kill()

    def kill(self) -> None:
        """End the processes; those that are still there print their stacks to their logs first."""
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(signal.SIGABRT)
        for rank in self._ranks:
            try:
                rank.process.wait(FAREWELL_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            rank.replies.close()
            with contextlib.suppress(BrokenPipeError):  # of a request that was never read
                _pipe(rank.process.stdin).close()

    def _start(self, build: Build, rank: int, world_size: int) -> Rank:
        log = self._directory / f"rank-{rank}.log"
        command = [sys.executable, "-u", "-W", "ignore", str(_HERE / "megatron_worker.py")]
        command += [f"--rank={rank}", f"--world-size={world_size}"]
        command += [f"--rendezvous={self._directory / 'rendezvous'}"]
        command += [f"--build={json.dumps(dataclasses.asdict(build))}"]
        with log.open("w") as errors:
            process = subprocess.Popen(
                command,
                env=_environment(build, rank, world_size),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        replies = os.fdopen(os.dup(_pipe(process.stdout).fileno()), "rb", buffering=0)
        _pipe(process.stdout).close()
        return Rank(process, log, replies)

    def _collect(self, timeout_s: float) -> list[dict[str, Any]]:
        """Wait until every rank has answered; a first failure shortens the wait for the others."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        reason = f"no answer within {timeout_s:g} s"
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                selector.register(rank.replies, selectors.EVENT_READ, number)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise self._failure(reason, answers)
                for key, _ in ready:
                    answer = _receive(self._ranks[key.data])
                    if answer is None:
                        continue
                    answers[key.data] = answer
                    selector.unregister(key.fileobj)
                    if answer["status"] in ("failed", "gone"):
                        reason = f"rank {key.data} {answer['status']}"
                        deadline = min(deadline, time.monotonic() + FAREWELL_S)
        if any(answer["status"] in ("failed", "gone") for answer in answers.values()):
            raise self._failure(reason, answers)
        return [answers[rank] for rank in sorted(answers)]

    def _failure(self, reason: str, answers: dict[int, dict[str, Any]]) -> GroupFailureError:
        self.kill()
        report = [reason]
        for number, rank in enumerate(self._ranks):
            report.append(f"===== rank {number}, exit status {rank.process.returncode}")
            said = answers.get(number, {}).get("traceback")
            tail = rank.log.read_bytes()[-LOG_TAIL_NBYTES:].decode(errors="replace")
            report.append(said if said is not None else tail)
        return GroupFailureError("\n".join(report))


class GroupPool:
    """Keeps the group that ran last, for cases of the same group tend to follow one another.

    Parameters
    ----------
    directory
        For the groups' own files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._group: WorkerGroup | None = None
        self._started = 0

    def run(self, case: Case, directory: Path) -> list[dict[str, Any]]:
        """Run a case in a group of its kind; after a failure the next case gets a new one.

        Raises
        ------
        GroupFailureError
            A rank failed, died or hung.
        """
        if self._group is not None and self._group.key != case.group:
            self.close()
        if self._group is None:
            self._started += 1
            home = self._directory / f"group-{self._started}"
            home.mkdir()
            self._group = WorkerGroup(*case.group, home)
        try:
            return self._group.run(case, directory)
        except BaseException:
            # Also when the test was interrupted: an answer that is still to come is not the next's.
            self._group.kill()
            self._group = None
            raise

    def close(self) -> None:
        """End the processes."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _environment(build: Build, rank: int, world_size: int) -> dict[str, str]:
    environment = dict(os.environ)
    paths = [build.path, str(_HERE.parent.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS repeats its results only with this
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron insists on it in some modes
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    if build.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # so that the shim works where there is a GPU
    return environment


def _receive(rank: Rank) -> dict[str, Any] | None:
    """Read what is there; None while the line is not complete."""
    part = rank.replies.read(1 << 16)
    if not part:
        return {"status": "gone"}
    rank.received += part
    if not rank.received.endswith(b"\n"):
        return None
    answer: dict[str, Any] = json.loads(rank.received)
    rank.received = b""
    return answer


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise TypeError("the process was started without a pipe")
    return stream
