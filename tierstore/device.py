"""The one seam between streaming and the device: copies, events and order, on CUDA or on the CPU.

Order is always said by events that the caller passes on, never by which stream happens to be
current. On a CUDA device there are three streams: one for copies in, one for copies out, and the
caller's own current stream for the update, so that gradients made and weights read by the caller
need no further synchronisation. On the CPU every copy is done when the call returns, and there
are no events.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["CpuDevice", "CudaDevice", "Device", "Events", "open_device"]

Events: TypeAlias = "tuple[torch.cuda.Event, ...]"
"""What must have happened; empty where everything is done at once."""

_Tensors: TypeAlias = "Sequence[torch.Tensor]"

_EVENTS_PER_STREAM = 256


class Device(Protocol):
    """What the core and the backends need of a device."""

    torch_device: torch.device
    asynchronous: bool
    """Whether copies are queued (and done when their event is) or done when the call returns."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes on the device: shape ``(nbytes,)``, uint8."""

    def copy_in(self, dsts: _Tensors, srcs: _Tensors, after: Events) -> Events:
        """Copy from host memory, one by one, once all of `after` have happened; when it is done."""

    def copy_out(self, dsts: _Tensors, srcs: _Tensors, after: Events) -> Events:
        """Copy to host memory, one by one, once all of `after` have happened; when it is done."""

    def mark(self) -> Events:
        """When all that the caller has queued so far is done."""

    def wait(self, events: Events) -> None:
        """Let what the caller queues from now on start only after `events`."""

    def synchronize(self) -> None:
        """Return when everything queued so far, by anybody, is done."""


class CpuDevice:
    """Tensors in ordinary memory: no streams, nothing is queued."""

    asynchronous = False

    def __init__(self) -> None:
        import torch

        self.torch_device = torch.device("cpu")

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Device`."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_in(self, dsts: _Tensors, srcs: _Tensors, after: Events) -> Events:
        """See `Device`."""
        for dst, src in zip(dsts, srcs, strict=True):
            dst.copy_(src)
        return ()

    copy_out = copy_in

    def mark(self) -> Events:
        """See `Device`."""
        return ()

    def wait(self, events: Events) -> None:
        """See `Device`."""

    def synchronize(self) -> None:
        """See `Device`."""


class _EventRing:
    """The events of one CUDA stream, used in turn, so that no tile has to make new ones.

    An event that is recorded again stands for a later point of the same stream. Whoever still
    waits for the earlier point then waits longer, and never too short; and not for ever, since all
    that a stream waits for has been queued before it.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        import torch

        self._stream = stream
        # Blocking: a thread that waits sleeps; it does not spin on a core that others need.
        self._events = [torch.cuda.Event(blocking=True) for _ in range(_EVENTS_PER_STREAM)]
        # Taking the next number is atomic, and so threads may share a ring.
        self._numbers = itertools.count()

    def record(self) -> torch.cuda.Event:
        """Event that happens when all that is queued on the stream so far is done."""
        event = self._events[next(self._numbers) % _EVENTS_PER_STREAM]
        event.record(self._stream)
        return event


class CudaDevice:
    """One CUDA device, with one stream for copies in and one for copies out.

    Parameters
    ----------
    device
        A CUDA device with an index.
    """

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        import torch

        self.torch_device = device
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)
        # By the stream's handle: the caller may use another stream at each step.
        self._rings: dict[int, _EventRing] = {}

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Device`."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def copy_in(self, dsts: _Tensors, srcs: _Tensors, after: Events) -> Events:
        """See `Device`."""
        return self._copy(self._in, dsts, srcs, after)

    def copy_out(self, dsts: _Tensors, srcs: _Tensors, after: Events) -> Events:
        """See `Device`."""
        return self._copy(self._out, dsts, srcs, after)

    def _copy(
        self, stream: torch.cuda.Stream, dsts: _Tensors, srcs: _Tensors, after: Events
    ) -> Events:
        import torch

        for event in after:
            stream.wait_event(event)
        # Called from I/O threads as well: the current stream is the thread's own.
        with torch.cuda.stream(stream):
            for dst, src in zip(dsts, srcs, strict=True):
                dst.copy_(src, non_blocking=True)
        return self._record(stream)

    def _record(self, stream: torch.cuda.Stream) -> Events:
        ring = self._rings.get(stream.cuda_stream)
        if ring is None:
            ring = self._rings.setdefault(stream.cuda_stream, _EventRing(stream))
        return (ring.record(),)

    def mark(self) -> Events:
        """See `Device`."""
        import torch

        return self._record(torch.cuda.current_stream(self.torch_device))

    def wait(self, events: Events) -> None:
        """See `Device`."""
        import torch

        if events:
            stream = torch.cuda.current_stream(self.torch_device)
            for event in events:
                stream.wait_event(event)

    def synchronize(self) -> None:
        """See `Device`."""
        import torch

        torch.cuda.synchronize(self.torch_device)


def open_device(device: torch.device) -> Device:
    """The seam for one torch device.

    Raises
    ------
    ConfigError
        Neither a CPU nor a CUDA device.
    """
    import torch

    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        # A tensor knows the index that "cuda" alone stands for.
        return CudaDevice(torch.empty(0, device=device).device)
    raise ConfigError(f"optimizer state on device {device} can't be streamed; use cpu or cuda")
