"""What the machine itself can do: the same bytes moved with nothing else to be done with them.

None of this uses a store's code, so that what a store loses shows. Limits of memory are here,
those of files in `benchmarks.file_limits`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch

from tierstore.backends._host_memory import HostSlab
from tierstore.device import Device

__all__ = ["HostCopies", "Limit", "PcieDuplex", "Rate", "fastest"]

_MOST_NBYTES = 16 * 10**9
"""Copies of more bytes than this, each way, would only take longer."""

_DISTINCT_NBYTES = 2 * 2**30
"""Host memory each way that copies go through: far more than caches hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One measurement of a limit.

    Parameters
    ----------
    how
        What was done.
    seconds
        How long it took.
    read_nbytes, written_nbytes
        Bytes in and out.
    """

    how: str
    seconds: float
    read_nbytes: int
    written_nbytes: int

    @property
    def gb_per_s(self) -> float:
        """Bytes in and out, in units of 10**9, per second."""
        return (self.read_nbytes + self.written_nbytes) / self.seconds / 1e9

    def to_json(self) -> Mapping[str, Any]:
        """Raw numbers and the rate."""
        return {**asdict(self), "gb_per_s": self.gb_per_s}


class Limit(Protocol):
    """Something that can be measured again and again while a store is idle."""

    def measure(self) -> list[Rate]:
        """Move the bytes, in one way or in several; the fastest is the limit."""

    def one_way(self) -> tuple[Rate, Rate]:
        """Read all bytes, and then write all of them: what is possible without overlap."""

    def close(self) -> None:
        """Give back memory and files."""


def fastest(rates: Iterable[Rate]) -> Rate:
    """The best of several ways."""
    return max(rates, key=lambda rate: rate.gb_per_s)


class PcieDuplex:
    """Copies from and to page-locked memory on two streams at once.

    Parameters
    ----------
    device
        A CUDA device.
    each_way_nbytes
        Bytes that the sweep moves each way; more than 16 GB are cut down to that.
    copy_nbytes
        Bytes of one copy: of a tile of one array.
    depth
        Device buffers each way.
    """

    def __init__(
        self, device: Device, each_way_nbytes: int, copy_nbytes: int, depth: int = 4
    ) -> None:
        where = device.torch_device
        self._device, self._copy_nbytes = device, copy_nbytes
        self._copies, places = _counts(each_way_nbytes, copy_nbytes)
        self._slab = HostSlab(2 * places * copy_nbytes, device)
        host = self._slab.tensor.split(copy_nbytes)
        self._host_in, self._host_out = host[:places], host[places:]
        self._in: Any = torch.cuda.Stream(where)
        self._out: Any = torch.cuda.Stream(where)
        random = torch.randint(0, 256, (2, depth, copy_nbytes), dtype=torch.uint8, device=where)
        self._device_in, self._device_out = random.unbind()
        for number, block in enumerate(self._host_in):
            block.copy_(self._device_in[number % depth])

    def measure(self) -> list[Rate]:
        """See `Limit`."""
        return [self._copy("page-locked copies in and out at once", into=True, out=True)]

    def one_way(self) -> tuple[Rate, Rate]:
        """See `Limit`."""
        return (
            self._copy("page-locked copies in alone", into=True, out=False),
            self._copy("page-locked copies out alone", into=False, out=True),
        )

    def _copy(self, how: str, *, into: bool, out: bool) -> Rate:
        depth = len(self._device_in)
        self._device.synchronize()
        started = time.perf_counter()
        for number in range(self._copies):
            place = number % len(self._host_in)
            if into:
                with torch.cuda.stream(self._in):
                    self._device_in[number % depth].copy_(self._host_in[place], non_blocking=True)
            if out:
                with torch.cuda.stream(self._out):
                    self._host_out[place].copy_(self._device_out[number % depth], non_blocking=True)
        self._device.synchronize()
        nbytes = self._copies * self._copy_nbytes
        return Rate(
            how=how,
            seconds=time.perf_counter() - started,
            read_nbytes=nbytes if into else 0,
            written_nbytes=nbytes if out else 0,
        )

    def close(self) -> None:
        """See `Limit`."""
        self._device.synchronize()
        self._slab.close()


class HostCopies:
    """The stand-in without a GPU: two threads copy memory, one for "in" and one for "out".

    Parameters are those of `PcieDuplex`.
    """

    def __init__(self, each_way_nbytes: int, copy_nbytes: int, depth: int = 4) -> None:
        self._copy_nbytes = copy_nbytes
        self._copies, places = _counts(each_way_nbytes, copy_nbytes)
        random = np.random.default_rng(0)
        self._far = [
            [_random_block(random, copy_nbytes) for _ in range(places)] for _ in ("in", "out")
        ]
        self._near = [
            [_random_block(random, copy_nbytes) for _ in range(depth)] for _ in ("in", "out")
        ]
        self._threads = ThreadPoolExecutor(2)

    def measure(self) -> list[Rate]:
        """See `Limit`."""
        return [self._timed("memcpy by two threads (no GPU)", into=True, out=True)]

    def one_way(self) -> tuple[Rate, Rate]:
        """See `Limit`."""
        return (
            self._timed("memcpy in alone (no GPU)", into=True, out=False),
            self._timed("memcpy out alone (no GPU)", into=False, out=True),
        )

    def _timed(self, how: str, *, into: bool, out: bool) -> Rate:
        started = time.perf_counter()
        ways = [(self._near[0], self._far[0])] * into + [(self._far[1], self._near[1])] * out
        for way in [self._threads.submit(self._copy, *way) for way in ways]:
            way.result()
        nbytes = self._copies * self._copy_nbytes
        return Rate(
            how=how,
            seconds=time.perf_counter() - started,
            read_nbytes=nbytes if into else 0,
            written_nbytes=nbytes if out else 0,
        )

    def _copy(self, to: list[np.ndarray[Any, Any]], of: list[np.ndarray[Any, Any]]) -> None:
        for number in range(self._copies):
            np.copyto(to[number % len(to)], of[number % len(of)])

    def close(self) -> None:
        """See `Limit`."""
        self._threads.shutdown()


def _counts(each_way_nbytes: int, copy_nbytes: int) -> tuple[int, int]:
    """How many copies each way, and how many places in host memory they go through in turn."""
    copies = max(1, min(each_way_nbytes, _MOST_NBYTES) // copy_nbytes)
    return copies, min(copies, max(1, _DISTINCT_NBYTES // copy_nbytes))


def _random_block(random: np.random.Generator, nbytes: int) -> np.ndarray[Any, Any]:
    return random.integers(0, 256, nbytes, dtype=np.uint8)
