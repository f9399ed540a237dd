"""Who owns a rank's directory."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from tierstore.errors import StateError

__all__ = ["Lease"]


class Lease:
    """Exclusive ownership of a rank's directory while this process lives.

    The lock goes with the process, however it ends; a forked child gives up its copy at once, so
    that it can't keep the directory locked after its parent.

    Parameters
    ----------
    path
        A file of the rank's directory that is there as long as the directory is, and is never
        replaced.

    Raises
    ------
    StateError
        Another process owns it.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise StateError(
                f"{path.parent} is in use by another process; two jobs can't share one store. "
                "Choose another --optimizer-state-dir or role"
            ) from error
        _leases.add(self)

    def close(self) -> None:
        """Give the directory free, also where a forked child still holds the file open."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.abandon()

    def abandon(self) -> None:
        """Let go of this process's hold on the file without ending the owner's."""
        os.close(self._descriptor)
        self._descriptor = -1


_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


def _abandon_leases() -> None:
    for lease in _leases:
        if lease._descriptor >= 0:
            lease.abandon()


os.register_at_fork(after_in_child=_abandon_leases)
