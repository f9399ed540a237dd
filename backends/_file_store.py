"""What the file tiers have in common: a rank's directory, two generations, commit and rollback."""

from __future__ import annotations

import contextlib
import logging
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tierstore.backends import _direct_io
from tierstore.backends._tree import GENERATIONS, Lease, RankTree
from tierstore.config import TierConfig
from tierstore.device import Device
from tierstore.errors import ConfigError, StateError, TierStoreError
from tierstore.records import Commit, Identity
from tierstore.store import Capabilities, Probe, TierStore

__all__ = ["FileStore"]

_logger = logging.getLogger("tierstore.files")


class FileStore(TierStore):
    """State in a rank's directory on a local drive; how tiles get there is the subclass's part.

    Two generations of files take turns, so that overwriting one leaves the other whole, and no
    file is ever made anew.

    Parameters
    ----------
    config, device, identity
        See `TierStore`; ``config.directory`` must be set. The rank's directory is
        ``<directory>/<role>-<nonce>/rank-<rank>``.

    Attributes
    ----------
    path
        The rank's directory.
    """

    def __init__(self, config: TierConfig, device: Device, identity: Identity) -> None:
        if config.directory is None:
            raise ConfigError(f"the {self.tier} tier needs a directory: --optimizer-state-dir")
        super().__init__(config, device, identity)
        self.capabilities = Capabilities(durable=True, rollback=config.recovery == "step")
        # Absolute: a trainer may change its working directory.
        root = Path(config.directory).absolute() / f"{config.role}-{identity.nonce}"
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
        if config.directory is None:
            return Probe(tier=cls.tier, ok=False, mode="none", reason="no directory was given")
        try:
            _direct_io.make_directories(config.directory)
            refused = _direct_io.direct_io_refused(config.directory)
            usage = shutil.disk_usage(config.directory)
        except OSError as error:
            reason = error.strerror or str(error)
            return Probe(tier=cls.tier, ok=False, mode="none", reason=reason)
        return Probe(
            tier=cls.tier,
            ok=True,
            mode="buffered" if refused else "direct",
            reason=refused,
            details={"free_nbytes": usage.free},
        )

    def _allocate(self) -> None:
        probe = self.probe(self.config, self.device)
        if not probe.ok:
            raise ConfigError(
                f"the {self.tier} tier can't run in {self.config.directory}: {probe.reason}. "
                "Choose a directory on a local drive that you may write to (--optimizer-state-dir)"
            )
        self._tree = RankTree(self.path, self.optimizers)
        generations = GENERATIONS[: 2 if self.config.recovery == "step" else 1]
        self._tree.require_space(len(generations))
        earlier = self._tree.earlier_runs()
        if earlier and self.identity.rank == 0:
            _logger.info(
                "%s: %d stores of other runs are in %s and stay untouched (%s); remove those of "
                "runs that have ended",
                self,
                len(earlier),
                self.config.directory,
                ", ".join(earlier[:5]),
            )
        # Blocks first: their errors come before anything is on the drive.
        self._start(_direct_io.direct_io_refused(self.config.directory))
        try:
            self._tree.create(self.identity, self.config.role)
            try:
                self._resources.callback(Lease(self.path).close)
                for generation in generations:
                    self._tree.create_generation(generation)
                self._made = True
            except BaseException:
                # Only what this call made: the directory was made by it, and by nobody else.
                self._tree.remove()
                raise
        except BaseException:
            self._resources.close()
            raise

    def open(self, path: Path) -> None:
        """See `TierStore`."""
        self._require("new")
        self.path = Path(path).absolute()
        self.config = replace(self.config, directory=self.path.parents[1])
        self._tree, self.identity = RankTree.load(self.path)
        self.optimizers = dict(self._tree.optimizers)
        try:
            self._resources.callback(Lease(self.path).close)
            self._tree.remove_leftovers()
            current, commit, _ = self._tree.current()
            if self.capabilities.rollback and self._other(current) is None:
                raise StateError(
                    f"{self.path} was made with --optimizer-state-recovery=none and has room for "
                    "one generation only; open it with the same setting"
                )
            chunk = next(self._tree.chunks(current), None)
            self._start("" if chunk is None else _direct_io.direct_opening_refused(chunk.path))
        except BaseException:
            self._resources.close()
            raise
        self._holds[current] = self.committed = commit
        self._phase = "idle"

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
