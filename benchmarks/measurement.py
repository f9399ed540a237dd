"""One size on one tier: limit, step, limit, step, ... in turn, and what each of them took."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks import machine
from benchmarks.file_limits import DirectFiles, FileLimit, KvikioFiles
from benchmarks.limits import HostCopies, Limit, PcieDuplex, Rate, fastest
from benchmarks.problem import Problem, make_problem
from benchmarks.streamed import Streamed, streamed
from tierstore.config import TierConfig
from tierstore.metrics import SweepMetrics

__all__ = ["Repeat", "SizeResult", "make_limit", "measure_size", "timed_step"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """One step.

    Parameters
    ----------
    step_s
        Seconds, from a synchronised device to a synchronised device.
    cpu_s
        Seconds that all threads of the process spent on CPUs meanwhile.
    page_cache_nbytes
        What the page cache of the whole machine grew by meanwhile.
    device_peak_nbytes
        Most device memory that the step took beyond what was allocated before it; 0 on the CPU.
    metrics
        The step's own account.
    """

    step_s: float
    cpu_s: float
    page_cache_nbytes: int
    device_peak_nbytes: int
    metrics: SweepMetrics

    @property
    def gb_per_s(self) -> float:
        """Bytes read and written, in units of 10**9, per second of the step."""
        moved_nbytes = self.metrics.read_nbytes + self.metrics.written_nbytes
        return moved_nbytes / self.step_s / 1e9

    @property
    def host_share(self) -> float:
        """Part of the sweep in which its thread neither waited for the tier nor committed."""
        waited_s = self.metrics.stall_read_s + self.metrics.stall_write_s + self.metrics.commit_s
        return (self.metrics.wall_s - waited_s) / self.metrics.wall_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """All that was measured of one size.

    Parameters
    ----------
    numel, state_nbytes
        Parameters, and bytes of their state.
    mode
        How bytes really move, as the store says.
    allocate_s, fill_s
        Seconds of setting up: reserving the tier, writing the first generation.
    window_nbytes, device_held_nbytes
        Device memory of the window, and what the allocator says that all of the state holds.
    store_host_nbytes, host_growth_nbytes
        Host memory that the store says it holds, and what the process's peak grew by while the
        state was set up and stepped, before there was any measurement of the limit.
    limits
        Measurements of the limit: one before the first step and one after each.
    repeats
        The steps.
    one_way
        Reading alone and writing alone, after each step, where that was asked for.
    """

    numel: int
    state_nbytes: int
    mode: str
    allocate_s: float
    fill_s: float
    window_nbytes: int
    device_held_nbytes: int
    store_host_nbytes: int
    host_growth_nbytes: int
    limits: Sequence[Sequence[Rate]]
    repeats: Sequence[Repeat]
    one_way: Sequence[tuple[Rate, Rate]] = ()

    @property
    def overlap_gains(self) -> list[float]:
        """How much longer all bytes take when none are read and written at once, at the limits."""
        return [
            sum(rate.seconds for rate in one_way)
            / sum(rate.read_nbytes + rate.written_nbytes for rate in one_way)
            * limit
            * 1e9
            for one_way, limit in zip(self.one_way, self.limits_gb_per_s[1:], strict=False)
        ]

    @property
    def limits_gb_per_s(self) -> list[float]:
        """The fastest way of each measurement of the limit."""
        return [fastest(rates).gb_per_s for rates in self.limits]

    @property
    def ratios(self) -> list[float]:
        """Each step's rate over the mean of the limits measured before and after it."""
        limits = self.limits_gb_per_s
        return [
            repeat.gb_per_s / ((before + after) / 2)
            for repeat, before, after in zip(self.repeats, limits[:-1], limits[1:], strict=True)
        ]

    def to_json(self) -> Mapping[str, Any]:
        """Raw numbers and what is computed from them."""
        return {
            **dataclasses.asdict(self),
            "limits": [[rate.to_json() for rate in rates] for rates in self.limits],
            "one_way": [[rate.to_json() for rate in rates] for rates in self.one_way],
            "overlap_gains": self.overlap_gains,
            "repeats": [
                {
                    **dataclasses.asdict(repeat),
                    "gb_per_s": repeat.gb_per_s,
                    "host_share": repeat.host_share,
                    "ratio": ratio,
                }
                for repeat, ratio in zip(self.repeats, self.ratios, strict=True)
            ],
        }


def measure_size(
    numel: int,
    config: TierConfig,
    *,
    device: torch.device,
    optimizer: str,
    repeats: int,
    warmup: int,
    seed: int,
    one_way: bool = False,
) -> SizeResult:
    """Set up a state of one size, measure it, and remove it.

    Parameters
    ----------
    numel
        Elements, a multiple of 64.
    config
        Tier and window.
    device, optimizer, seed
        Where the update runs, a name of `benchmarks.problem.OPTIMIZERS`, and of which data.
    repeats, warmup
        Steps that count, and steps with a measurement of the limit that do not: after one of them
        every file has been written once and moments are not zero.
    one_way
        Whether to measure reading alone and writing alone after each step.

    Raises
    ------
    TierStoreError
        The tier can't run, or has no room.
    """
    try:
        problem = make_problem(numel, device, seed)
        return _measure(problem, config, optimizer, repeats, warmup, one_way=one_way)
    finally:
        # The state and its callbacks refer to each other: they hold memory until a collection.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(
    problem: Problem,
    config: TierConfig,
    optimizer: str,
    repeats: int,
    warmup: int,
    *,
    one_way: bool,
) -> SizeResult:
    device = problem.weight.device
    machine.reset_peak_memory()
    host_before_nbytes = machine.peak_memory_nbytes()
    device_before_nbytes = _allocated_nbytes(device)
    with streamed(problem, config, optimizer) as subject:
        held_nbytes = _allocated_nbytes(device) - device_before_nbytes
        for _ in range(warmup):
            subject.step()
        host_growth_nbytes = machine.peak_memory_nbytes() - host_before_nbytes
        limit = make_limit(subject)
        try:
            subject.come_to_rest()
            for _ in range(warmup):
                limit.measure()
            limits = [limit.measure()]
            steps, one_ways = [], []
            for _ in range(repeats):
                steps.append(timed_step(subject))
                limits.append(limit.measure())
                if one_way:
                    one_ways.append(limit.one_way())
        finally:
            limit.close()
        store = subject.state.store
        return SizeResult(
            numel=problem.numel,
            state_nbytes=subject.layout.nbytes,
            mode=store.mode,
            allocate_s=subject.allocate_s,
            fill_s=subject.fill_s,
            window_nbytes=subject.state.window.nbytes,
            device_held_nbytes=held_nbytes,
            store_host_nbytes=store.host_nbytes,
            host_growth_nbytes=host_growth_nbytes,
            limits=limits,
            repeats=steps,
            one_way=one_ways,
        )


def timed_step(subject: Streamed) -> Repeat:
    """One step from rest to rest, and what it took: all of its bytes move within its time."""
    device = subject.state.store.device
    cuda = device.torch_device.type == "cuda"
    device.synchronize()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device.torch_device)
    allocated_nbytes = _allocated_nbytes(device.torch_device)
    cached_nbytes, cpu_s = machine.page_cache_nbytes(), machine.cpu_s()
    started = time.perf_counter()
    subject.step()
    subject.come_to_rest()
    step_s = time.perf_counter() - started
    cpu_s = machine.cpu_s() - cpu_s
    cached_nbytes = machine.page_cache_nbytes() - cached_nbytes
    peak_nbytes = torch.cuda.max_memory_allocated(device.torch_device) if cuda else 0
    metrics = subject.state.last
    if metrics is None:
        raise RuntimeError("a step left no metrics")
    return Repeat(
        step_s=step_s,
        cpu_s=cpu_s,
        page_cache_nbytes=cached_nbytes,
        device_peak_nbytes=max(peak_nbytes - allocated_nbytes, 0),
        metrics=metrics,
    )


def make_limit(subject: Streamed) -> Limit:
    """What the machine can do in place of a sweep of this state."""
    store = subject.state.store
    config, device = store.config, store.device
    forms = list(subject.layout.formats.values())
    if config.tier == "cpu":
        sweep_nbytes = subject.layout.layout.n_tiles * sum(form.tile_nbytes for form in forms)
        if device.asynchronous:
            return PcieDuplex(device, sweep_nbytes, forms[0].tile_nbytes)
        return HostCopies(sweep_nbytes, forms[0].tile_nbytes)
    if config.tier == "gds":
        return FileLimit(store, KvikioFiles(device.torch_device, depth=2 * config.slots))
    return FileLimit(store, DirectFiles(config.io_threads, direct=store.mode == "direct"))


def _allocated_nbytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
