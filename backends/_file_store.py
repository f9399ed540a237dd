"""What the file tiers have in common: a rank's directory, two generations, commit and rollback."""

from __future__ import annotations

import contextlib
import logging
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tierstore.backends import _direct_io, _placement
from tierstore.backends._tree import GENERATIONS, RankTree
from tierstore.config import TierConfig
from tierstore.device import Device
from tierstore.errors import ConfigError, StateError, TierStoreError
from tierstore.records import Commit, Identity
from tierstore.store import Capabilities, Probe, TierStore

__all__ = ["FileStore"]

_logger = logging.getLogger("tierstore.files")


class FileStore(TierStore):
    """State in files on local drives; how tiles get there is the subclass's part.

    Two generations of files take turns, so that overwriting one leaves the other whole, and no
    file is ever made anew.

    Parameters
    ----------
    config, device, identity
        See `TierStore`; ``config.directories`` must not be empty. The rank's directory is
        ``<directory>/<role>-<nonce>/rank-<rank>``, in each of them.

    Attributes
    ----------
    path
        The rank's directory in the first of them.
    """

    def __init__(self, config: TierConfig, device: Device, identity: Identity) -> None:
        if not config.directories:
            raise ConfigError(f"the {self.tier} tier needs a directory: --optimizer-state-dir")
        super().__init__(config, device, identity)
        self.capabilities = Capabilities(durable=True, rollback=config.recovery == "step")
        # Absolute: a trainer may change its working directory.
        root = config.directories[0].absolute() / f"{config.role}-{identity.nonce}"
        self.path = root / identity.directory_name
        self._made = False
        # What each generation holds; the current one is the one that holds `committed`.
        self._holds: dict[str, Commit] = {}
        self._doubted: Commit | None = None
        self._target = GENERATIONS[0]
        self._resources = contextlib.ExitStack()

    @abstractmethod
    def _start(self, refused: str) -> None:
        """Take memory and threads, put what gives them back on `self._resources`, set `mode`.

        Called before anything is on the drive. `refused` says why the file system does no direct
        I/O, if it does none.
        """

    @abstractmethod
    def _run_all(self, function: Callable[[Any], None], items: Iterable[Any]) -> None:
        """Call `function` for each item in the I/O threads; see `IoThreads.run_all`."""

    @classmethod
    def probe(cls, config: TierConfig, device: Device) -> Probe:
        """See `TierStore`."""
        if not config.directories:
            return Probe(tier=cls.tier, ok=False, mode="none", reason="no directory was given")
        try:
            for directory in config.directories:
                _direct_io.make_directories(directory)
            refused = _direct_io_refused(config.directories)
            free_nbytes = {
                str(directory): shutil.disk_usage(directory).free
                for directory in config.directories
            }
        except OSError as error:
            reason = error.strerror or str(error)
            return Probe(tier=cls.tier, ok=False, mode="none", reason=reason)
        return Probe(
            tier=cls.tier,
            ok=True,
            mode="buffered" if refused else "direct",
            reason=refused,
            details={"free_nbytes": free_nbytes},
        )

    def _allocate(self) -> None:
        directories = self.config.directories
        named = ", ".join(map(str, directories))
        probe = self.probe(self.config, self.device)
        if not probe.ok:
            raise ConfigError(
                f"the {self.tier} tier can't run in {named}: {probe.reason}. Choose a directory on "
                "a local drive that you may write to (--optimizer-state-dir)"
            )
        others = self._others()
        generations = GENERATIONS[: 2 if self.config.recovery == "step" else 1]
        _placement.require_space((self.path, *others), self.optimizers, len(generations))
        earlier = _placement.earlier_runs((self.path, *others))
        if earlier and self.identity.rank == 0:
            _logger.info(
                "%s: %d stores of other runs are in %s and stay untouched (%s); remove those of "
                "runs that have ended",
                self,
                len(earlier),
                named,
                ", ".join(earlier[:5]),
            )
        places = None
        if others:
            rates = _placement.measure(directories)
            places = _placement.place_chunks(self.optimizers, directories, len(generations), rates)
            _placement.report(directories, places, rates, self.config.slots)
        self._tree = RankTree(self.path, self.optimizers, others, places)
        # Blocks first: their errors come before anything is on the drive.
        self._start(_direct_io_refused(directories))
        try:
            self._tree.create(self.identity, self.config.role)
            try:
                self._resources.callback(self._tree.lease().close)
                for generation in generations:
                    self._tree.create_generation(generation)
                self._made = True
            except BaseException:
                # Only what this call made: the directories were made by it, and by nobody else.
                self._tree.remove()
                raise
        except BaseException:
            self._resources.close()
            raise

    def open(self, path: Path) -> None:
        """See `TierStore`."""
        self._require("new")
        self.path = Path(path).absolute()
        self._tree, self.identity = RankTree.load(self.path, self._others())
        directories = (self.path.parents[1], *self.config.directories[1:])
        self.config = replace(self.config, directories=directories)
        self.optimizers = dict(self._tree.optimizers)
        try:
            self._resources.callback(self._tree.lease().close)
            self._tree.remove_leftovers()
            current, commit, _ = self._tree.current()
            if self.capabilities.rollback and self._other(current) is None:
                raise StateError(
                    f"{self.path} was made with --optimizer-state-recovery=none and has room for "
                    "one generation only; open it with the same setting"
                )
            refusals = (
                f"{refused} for {chunk.path}"
                for chunk in self._tree.chunks(current)
                if (refused := _direct_io.direct_opening_refused(chunk.path))
            )
            self._start(next(refusals, ""))
        except BaseException:
            self._resources.close()
            raise
        self._holds[current] = self.committed = commit
        self._phase = "idle"

    @property
    def _n_threads(self) -> int:
        # All arrays of a tile lie on one drive: few threads would all be at the same one.
        return self.config.io_threads * len(self.config.directories)

    def _others(self) -> tuple[Path, ...]:
        """The rank's directories on further drives, by what the user named: no record says them."""
        below = Path(self.path.parent.name, self.path.name)
        return tuple(path.absolute() / below for path in self.config.directories[1:])

    def order(self, optimizer: str) -> Sequence[int]:
        """See `TierStore`: no drive waits while the sweep is at another one."""
        layout = self.optimizers[optimizer].layout
        return _placement.sweep_order(layout, self._tree.places[optimizer])

    def _other(self, generation: str) -> str | None:
        other = GENERATIONS[1 - GENERATIONS.index(generation)]
        return other if (self.path / other).is_dir() else None

    @property
    def _current(self) -> str | None:
        return next((name for name, held in self._holds.items() if held is self.committed), None)

    def _begin(self) -> None:
        current = self._current
        if current is not None and self.committed is not None:
            if self._doubted not in (None, self.committed):
                # A commit failed half way: on the drive either generation may be the current one.
                # The one that is not about to be overwritten must be.
                self._tree.finish(current, self.committed, self.identity.nonce)
            self._doubted = None
        if current is None:
            self._target = GENERATIONS[0]
        elif self.capabilities.rollback:
            self._target = GENERATIONS[1 - GENERATIONS.index(current)]
        else:
            self._target = current
        # On the drive before the first overwrite: after a crash the record must not say that a
        # half overwritten generation is whole.
        self._tree.write_record(self._target, {"state": "writing"})

    def _commit(self, commit: Commit) -> None:
        paths = [chunk.path for chunk in self._tree.chunks(self._target)]
        self._run_all(_direct_io.sync_data, paths)
        self._doubted = commit
        self._tree.finish(self._target, commit, self.identity.nonce)
        self._holds[self._target] = commit
        # For people only: where the link can't be made nothing is lost.
        with contextlib.suppress(TierStoreError):
            _direct_io.replace_link(self.path / "current", self._target)

    def _snapshot(self, target: Path, commit: Commit) -> None:
        if self._current is None:
            raise StateError(f"{self}: there is no current generation")
        tree = RankTree(target / self.identity.directory_name, self.optimizers)
        with tree.of_one_generation(self.identity, self.config.role, commit) as generation:
            for source, copy in zip(
                self._tree.chunks(self._current), tree.chunks(generation), strict=True
            ):
                _direct_io.copy_data(source.path, copy.path, source.nbytes)

    def _close(self, discard: bool) -> None:
        # While the lease is still held, so that nobody else can have taken the directory up.
        if discard and self._made:
            self._tree.remove()
        self._resources.close()


def _direct_io_refused(directories: Sequence[Path]) -> str:
    """Why one of the directories does no direct I/O, or nothing if all do."""
    for directory in directories:
        if refused := _direct_io.direct_io_refused(directory):
            return f"{refused} in {directory}"
    return ""
