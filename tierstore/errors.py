"""Every error that tierstore raises on purpose.

::

    TierStoreError
    ├── ConfigError            (ValueError)   an option is wrong, or does not go with another one
    ├── BackendUnavailableError (ImportError) this tier can't run here
    ├── LayoutError            (ValueError)   shards, arrays or tiles that do not fit together
    ├── OptimizerError         (TypeError)    the optimizer's update can't be cut into tiles
    ├── CorruptError           (ValueError)   bytes at rest are not what was written
    ├── CapacityError          (OSError)      no space, no memory, no quota; ``errno`` is kept
    ├── TransferError          (OSError)      a read or write failed; ``errno`` is kept
    ├── TransferTimeoutError   (TimeoutError) a read or write did not come back
    ├── PeerError              (RuntimeError) another rank of the job failed, or is gone
    └── StateError             (RuntimeError) a call that the store's present state forbids

A message says what happened, where (file, offset, array, tile) and what to do about it.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BackendUnavailableError",
    "CapacityError",
    "ConfigError",
    "CorruptError",
    "LayoutError",
    "OptimizerError",
    "PeerError",
    "StateError",
    "TierStoreError",
    "TransferError",
    "TransferTimeoutError",
]


class TierStoreError(Exception):
    """Root of the tree; ``kind`` is a stable word for logs and for machines."""

    kind: ClassVar[str] = "error"


class ConfigError(TierStoreError, ValueError):
    """An option is wrong, or does not go with another one."""

    kind = "config"


class BackendUnavailableError(TierStoreError, ImportError):
    """The tier can't run on this machine; the message says what is missing."""

    kind = "unavailable"


class LayoutError(TierStoreError, ValueError):
    """Shards, arrays or tiles that do not fit together."""

    kind = "layout"


class OptimizerError(TierStoreError, TypeError):
    """The optimizer's update can't be applied tile by tile with the same result."""

    kind = "optimizer"


class CorruptError(TierStoreError, ValueError):
    """Bytes at rest are not the bytes that were written."""

    kind = "corrupt"


class CapacityError(TierStoreError, OSError):
    """No space, no memory or no quota left; found before the first step."""

    kind = "capacity"


class TransferError(TierStoreError, OSError):
    """A read or write failed; ``errno`` is the system's own."""

    kind = "transfer"


class TransferTimeoutError(TierStoreError, TimeoutError):
    """A read or write did not come back before its deadline."""

    kind = "timeout"


class PeerError(TierStoreError, RuntimeError):
    """Another rank of the job failed in this step, or does not answer; its own log says why."""

    kind = "peer"


class StateError(TierStoreError, RuntimeError):
    """A call that the present state of the store forbids (closed, not allocated, failed)."""

    kind = "state"
