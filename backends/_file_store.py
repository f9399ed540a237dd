"""What the file tiers have in common: a rank's directory, two generations, commit and rollback."""

from __future__ import annotations

import contextlib
import logging
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tierstore.answers import Capabilities, FrozenFile, Offer, Probe
from tierstore.backends import _direct_io, _placement
from tierstore.backends._frozen import Frozen
from tierstore.backends._tree import GENERATIONS, RankTree
from tierstore.config import TierConfig
from tierstore.device import Device
from tierstore.errors import ConfigError, StateError, TierStoreError
from tierstore.records import Commit, Identity
from tierstore.store import TierStore

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
        two = config.recovery == "step"
        self.capabilities = Capabilities(durable=True, rollback=two, freeze=two)
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

    def _files_replaced(self) -> None:
        """Forget open chunk files: other files have their names now."""

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
        others = _beside(self.path, self.config)
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

    @classmethod
    def offers(cls, config: TierConfig, rank: int) -> list[Offer]:
        """See `TierStore`."""
        if not config.directories:
            return []
        name = Identity(nonce="", rank=rank).directory_name
        found = list(config.directories[0].absolute().glob(f"{config.role}-*/{name}"))
        found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        offers = (cls._offer(config, path) for path in found)
        return [offer for offer in offers if offer is not None]

    @classmethod
    def _offer(cls, config: TierConfig, path: Path) -> Offer | None:
        nonce = path.parent.name.removeprefix(f"{config.role}-")
        try:
            tree, identity = RankTree.load(path, _beside(path, config))
            if identity.nonce != nonce:
                return None  # of a role whose name begins like this one's
            # Refused while another process owns it; given free at once.
            tree.lease().close()
            current, _, _ = tree.current()
            other = GENERATIONS[1 - GENERATIONS.index(current)]
            if config.recovery == "step" and not (path / other).is_dir():
                raise StateError(f"{path} was made with --optimizer-state-recovery=none")
            held = [tree.held(generation) for generation in GENERATIONS]
        except (TierStoreError, OSError) as error:
            return Offer(path=path, nonce=nonce, problem=str(error))
        steps = sorted({commit.step for commit in held if commit is not None}, reverse=True)
        return Offer(
            path=path,
            nonce=nonce,
            steps=tuple(steps),
            layouts={name: entry.fingerprint for name, entry in tree.optimizers.items()},
            problem="" if steps else f"{path} holds no whole step",
        )

    def open(self, path: Path, *, step: int | None = None) -> None:
        """See `TierStore`."""
        self._require("new")
        self.path = Path(path).absolute()
        self._tree, self.identity = RankTree.load(self.path, _beside(self.path, self.config))
        directories = (self.path.parents[1], *self.config.directories[1:])
        self.config = replace(self.config, directories=directories)
        self.optimizers = dict(self._tree.optimizers)
        try:
            self._resources.callback(self._tree.lease().close)
            self._tree.remove_leftovers()
            current, commit = self._take_up(step)
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
            self._kept.take_up(current)
        except BaseException:
            self._resources.close()
            raise
        self._holds[current] = self.committed = commit
        self._phase = "idle"

    def _take_up(self, step: int | None) -> tuple[str, Commit]:
        """The generation to go on from; it is the one that COMMIT names when this returns."""
        current, commit, _ = self._tree.current()
        if step not in (None, commit.step):
            held = {name: self._tree.held(name) for name in GENERATIONS}
            found = next(
                ((n, c) for n, c in held.items() if c is not None and c.step == step), None
            )
            if found is None:
                raise StateError(f"{self.path} holds step {commit.step}, and no whole step {step}")
            current, commit = found
            self._tree.finish(current, commit, self.identity.nonce)
        self._tree.forget_after(current, commit.step)
        return current, commit

    def _rollback(self) -> None:
        if self._current is not None and self.committed is not None:
            self._tree.forget_after(self._current, self.committed.step)
            self._holds = {self._current: self.committed}

    def _rollback_to(self, step: int) -> Commit:
        for generation, held in self._holds.items():
            if held.step == step:
                self._tree.finish(generation, held, self.identity.nonce)
                return held
        return super()._rollback_to(step)

    @property
    def _n_threads(self) -> int:
        # All arrays of a tile lie on one drive: few threads would all be at the same one.
        return self.config.io_threads * len(self.config.directories)

    def order(self, optimizer: str) -> Sequence[int]:
        """See `TierStore`: no drive waits while the sweep is at another one."""
        if len(self.config.directories) == 1:
            return super().order(optimizer)
        layout = self.optimizers[optimizer].layout
        return _placement.sweep_order(layout, self._tree.places[optimizer])

    def _other(self, generation: str) -> str | None:
        other = GENERATIONS[1 - GENERATIONS.index(generation)]
        return other if (self.path / other).is_dir() else None

    @cached_property
    def _kept(self) -> Frozen:
        return Frozen(self._tree, self._run_all)

    @property
    def _current(self) -> str | None:
        # Copied at once: another thread may ask, for a release, when a step begins or ends.
        holds = list(self._holds.items())
        return next((name for name, held in holds if held is self.committed), None)

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
        if self.capabilities.rollback:
            self._holds.pop(self._target, None)
        linked = self._kept.linked(self._target)
        if linked and self._target == current:
            raise StateError(
                f"{len(linked)} chunk files of {self.path / current} have a second name, such as "
                f"{linked[0].path}, and without recovery they would be overwritten. Release what "
                "is frozen, or open the store with --optimizer-state-recovery=step"
            )
        # On the drive before the first overwrite: after a crash the record must not say that a
        # half overwritten generation is whole.
        self._tree.write_record(self._target, {"state": "writing"})
        if linked:
            # Nothing is being read of this generation: it has not been the current one since the
            # last commit or rollback, which waited for all transfers. Reads ahead are of the
            # other one.
            try:
                self._kept.replace(linked)
            finally:
                self._files_replaced()

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

    def _freeze(self, name: str, commit: Commit) -> None:
        if not self.capabilities.freeze:
            raise StateError(
                f"{self} overwrites its only generation in place, so it can't be frozen. Use "
                "--optimizer-state-recovery=step, or copy the state (snapshot)"
            )
        if self._current is None:
            raise StateError(f"{self}: there is no current generation")
        self._kept.freeze(name, self._current, commit, self.identity.nonce)

    def _frozen(self) -> dict[str, Commit]:
        return self._kept.commits()

    def _release(self, name: str) -> None:
        self._kept.release(name, self._current)

    def _frozen_files(self, name: str) -> Iterator[FrozenFile]:
        return iter(self._kept.files(name))

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


def _beside(path: Path, config: TierConfig) -> tuple[Path, ...]:
    """The rank's directories on further drives, by what the user named: no record says them."""
    below = Path(path.parent.name, path.name)
    return tuple(directory.absolute() / below for directory in config.directories[1:])
