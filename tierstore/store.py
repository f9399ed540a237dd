"""`TierStore`: the interface that a tier implements, and the rules that hold for every tier.

The public methods check and keep account; a tier implements the underscored ones. A store belongs
to one rank and holds all optimizers of the rank's chain. Its life::

    allocate ---> begin ---> write every tile of every array ---> commit ---> begin ---> ...
                    ^             (reads see the last commit)        |
                    '--------------- rollback <--- an error ---------'
"""

from __future__ import annotations

import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tierstore.errors import (
    ConfigError,
    LayoutError,
    StateError,
    TransferTimeoutError,
)
from tierstore.records import ArrayKey, Commit, OptimizerLayout
from tierstore.transfer import Transfer, together

if TYPE_CHECKING:
    import torch

    from tierstore.answers import Capabilities, FrozenFile, Offer, Probe
    from tierstore.config import TierConfig
    from tierstore.device import Device, Events
    from tierstore.records import Identity

__all__ = ["TierStore"]


_FROZEN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")


class TierStore(ABC):
    """State arrays of one rank on one tier.

    A tier is added by subclassing this, registering the class under the entry point group
    ``tierstore.backends``, and subclassing ``tierstore.testing.conformance.TierStoreTests`` for
    its tests (which need the extra ``test``).

    Parameters
    ----------
    config
        The user's choices.
    device
        Where the tensors are that `read` fills and `write` takes.
    identity
        Whose state it is.

    Attributes
    ----------
    read_sets, write_sets
        Tiles (one of every array of an optimizer) that may be on their way in, and out, at once;
        known after `allocate`. The caller keeps to them; a store never waits for a place.
    host_nbytes
        Host memory that the store holds, page-locked where there is CUDA.
    mode
        How bytes really move, as `Probe.mode` has it; known after `allocate`.
    """

    tier: ClassVar[str]
    capabilities: Capabilities

    def __init__(self, config: TierConfig, device: Device, identity: Identity) -> None:
        self.config = config
        self.device = device
        self.identity = identity
        self.optimizers: dict[str, OptimizerLayout] = {}
        self.committed: Commit | None = None
        self.read_sets = self.write_sets = config.slots
        self.host_nbytes = 0
        self.mode = "unknown"
        self._phase = "new"
        self._owner_pid = os.getpid()
        self._unwritten: dict[ArrayKey, set[int]] = {}
        # Transfers on their way, and the first failure of a write of this generation. Counted, not
        # kept: a transfer that its own callback refers to would live until a garbage collection,
        # and trainers switch those off.
        self._on_their_way = 0
        self._generation = 0
        self._failure: BaseException | None = None
        self._settling = threading.Condition()

    # What a tier implements.

    @classmethod
    @abstractmethod
    def probe(cls, config: TierConfig, device: Device) -> Probe:
        """Find out by trying whether, and how, the tier can run; raises nothing."""

    @abstractmethod
    def _allocate(self) -> None:
        """Reserve every byte that `self.optimizers` need, or raise `CapacityError`."""

    @abstractmethod
    def _begin(self) -> None:
        """Make ready to write the next generation."""

    @abstractmethod
    def _read(self, key: ArrayKey, tile: int, out: torch.Tensor, after: Events) -> Transfer:
        """Start filling `out` from the last commit, once all of `after` have happened."""

    @abstractmethod
    def _write(self, key: ArrayKey, tile: int, src: torch.Tensor, after: Events) -> Transfer:
        """Start writing `src` to the next generation, once all of `after` have happened."""

    def _read_tile(
        self, keys: Sequence[ArrayKey], tile: int, outs: Mapping[str, torch.Tensor], after: Events
    ) -> Transfer:
        """`_read` of every array of an optimizer; a tier may have a way for all at once."""
        return self._together(lambda key: self._read(key, tile, outs[key.name], after), keys)

    def _write_tile(
        self, keys: Sequence[ArrayKey], tile: int, srcs: Mapping[str, torch.Tensor], after: Events
    ) -> Transfer:
        """`_write` of every array of an optimizer; a tier may have a way for all at once."""
        return self._together(lambda key: self._write(key, tile, srcs[key.name], after), keys)

    def _together(
        self, start: Callable[[ArrayKey], Transfer], keys: Sequence[ArrayKey]
    ) -> Transfer:
        parts: list[Transfer] = []
        try:
            for key in keys:
                parts.append(start(key))  # noqa: PERF401 - what has begun must be known
        except BaseException:
            # Those that have begun are on their way, and `settle` must wait for them.
            for part in parts:
                self._follow(part)
            raise
        return together(parts)

    @abstractmethod
    def _commit(self, commit: Commit) -> None:
        """Make what was written the current generation, all or nothing."""

    @abstractmethod
    def _snapshot(self, target: Path, commit: Commit) -> None:
        """Write the current generation below the directory `target`, which may not exist yet.

        Each array becomes ``<target>/<identity.directory_name>/gen-a/<optimizer>/<array>``, with
        metadata and chunk files as `ArrayFormat` has them; the attributes of ``gen-a`` hold
        ``{"tierstore": {"state": "complete", "step": ...}}``, written last. On an error nothing
        of it is left.
        """

    def _freeze(self, name: str, commit: Commit) -> None:
        """Keep the current generation, all or nothing, by a name that may be in use."""
        raise StateError(f"the {self.tier} tier can't freeze its state; copy it (snapshot)")

    def _frozen(self) -> dict[str, Commit]:
        """The frozen generations that are whole."""
        return {}

    def _release(self, name: str) -> None:
        """Remove a frozen generation."""
        raise StateError(f"the {self.tier} tier has nothing frozen as {name!r}")

    def _frozen_files(self, name: str) -> Iterator[FrozenFile]:
        """Yield the files of a frozen generation, the one that says that it is whole last."""
        raise StateError(f"the {self.tier} tier has nothing frozen as {name!r}")

    @abstractmethod
    def _close(self, discard: bool) -> None:
        """Give back memory, threads and locks; remove what `allocate` made if `discard` is set."""

    def order(self, optimizer: str) -> Sequence[int]:
        """The tiles of an optimizer in the order in which a sweep had best take them."""
        return range(self.optimizers[optimizer].layout.n_tiles)

    @classmethod
    def offers(cls, config: TierConfig, rank: int) -> list[Offer]:
        """State of earlier runs in the configured place, newest run first; raises nothing."""
        return []

    def _rollback_to(self, step: int) -> Commit:
        """Make the generation before the last commit the current one again, if it is that step."""
        raise StateError(f"{self} holds one step only, and step {step} is gone; load a checkpoint")

    def _rollback(self) -> None:  # noqa: B027 - most tiers have nothing to do here
        """Forget what was written since `_begin`; no transfer is on its way."""

    # What everybody calls.

    def allocate(self, optimizers: Sequence[OptimizerLayout]) -> None:
        """Reserve every byte now, so that running out of space is known before the first step.

        Raises
        ------
        CapacityError
            Not enough space or memory; nothing is left behind.
        ConfigError
            The cap on host memory is below the tier's minimum; the message has the number.
        LayoutError
            No optimizer, or two of one name.
        """
        self._require("new")
        if not optimizers or len({entry.name for entry in optimizers}) != len(optimizers):
            raise LayoutError("allocate needs at least one optimizer, each with a name of its own")
        self.optimizers = {entry.name: entry for entry in optimizers}
        self._allocate()
        self._phase = "idle"

    def begin(self, *, anew: bool = False) -> None:
        """Start a new generation. Until `commit`, reads see the last one.

        Parameters
        ----------
        anew
            Every tile will be written without being read: a failed generation is no hindrance.

        Raises
        ------
        StateError
            Not allocated, closed, already begun, or failed and not rolled back.
        """
        if anew and self._phase in ("writing", "failed"):
            self.settle()
            self._rollback()
            self._phase = "idle"
        self._require("idle")
        self._begin()
        self._generation += 1
        self._failure = None
        self._unwritten = {
            key: set(range(entry.layout.n_tiles))
            for entry in self.optimizers.values()
            for key in entry.keys()
        }
        self._phase = "writing"

    def read(self, key: ArrayKey, tile: int, out: torch.Tensor, *, after: Events = ()) -> Transfer:
        """Start reading one tile of the last commit.

        Parameters
        ----------
        key, tile
            Which tile of which array.
        out
            Contiguous tensor of ``tile_numel`` elements of the array's type on the device; all of
            it is filled, for the last tile as well.
        after
            Events that must all have happened before `out` is overwritten.

        Raises
        ------
        StateError
            Nothing has been committed, or the store is closed or failed.
        LayoutError
            No such array or tile, or `out` does not fit.
        """
        self._require("idle", "writing")
        if self.committed is None:
            raise StateError(f"{self}: nothing was committed yet, so there is nothing to read")
        self._check(key, tile, out)
        return self._follow(self._read(key, tile, out, after))

    def write(self, key: ArrayKey, tile: int, src: torch.Tensor, *, after: Events = ()) -> Transfer:
        """Start writing one tile of the generation that `begin` started.

        Parameters and errors as for `read`; `src` must not change until the transfer's
        ``device_done``. Each tile is written once per generation.
        """
        self._require("writing")
        self._check(key, tile, src)
        self._require_unwritten(key, tile)
        transfer = self._follow(self._write(key, tile, src, after), self._generation)
        self._unwritten[key].discard(tile)
        return transfer

    def read_tile(
        self, optimizer: str, tile: int, outs: Mapping[str, torch.Tensor], *, after: Events = ()
    ) -> Transfer:
        """Start reading one tile of every array of an optimizer: `read`, by array name."""
        self._require("idle", "writing")
        if self.committed is None:
            raise StateError(f"{self}: nothing was committed yet, so there is nothing to read")
        keys = self._keys(optimizer)
        for key in keys:
            self._check(key, tile, outs[key.name])
        return self._follow(self._read_tile(keys, tile, outs, after))

    def write_tile(
        self, optimizer: str, tile: int, srcs: Mapping[str, torch.Tensor], *, after: Events = ()
    ) -> Transfer:
        """Start writing one tile of every array of an optimizer: `write`, by array name."""
        self._require("writing")
        keys = self._keys(optimizer)
        for key in keys:
            self._check(key, tile, srcs[key.name])
            self._require_unwritten(key, tile)
        transfer = self._follow(self._write_tile(keys, tile, srcs, after), self._generation)
        for key in keys:
            self._unwritten[key].discard(tile)
        return transfer

    def _follow(self, transfer: Transfer, generation: int | None = None) -> Transfer:
        with self._settling:
            self._on_their_way += 1
        transfer.settled.add_done_callback(partial(self._settled, generation))
        return transfer

    def _settled(self, generation: int | None, future: Future[None]) -> None:
        with self._settling:
            self._on_their_way -= 1
            # Of a read the reader hears; a failed write must keep its generation from a commit.
            if generation == self._generation and self._failure is None:
                self._failure = future.exception()
            self._settling.notify_all()

    def settle(self) -> None:
        """Return when no transfer is on its way.

        Raises
        ------
        TransferTimeoutError
            Not within the configured time.
        """
        with self._settling:
            if not self._settling.wait_for(
                lambda: self._on_their_way == 0, timeout=self.config.timeout_s
            ):
                raise TransferTimeoutError(
                    f"{self}: {self._on_their_way} transfers did not come back within "
                    f"{self.config.timeout_s:g} s; the drive or file system hangs"
                )

    def commit(
        self, step: int, state: Mapping[str, Any], job: Mapping[str, Any] | None = None
    ) -> None:
        """Make what was written since `begin` the current generation.

        Waits for writes on their way. Parameters are those of `Commit`.

        Raises
        ------
        StateError
            `begin` was not called, or a tile was not written: every tile of every array must be.
        TierStoreError
            The first error of any write of this generation.
        """
        self._require("writing")
        try:
            missing = next(((key, min(t)) for key, t in self._unwritten.items() if t), None)
            if missing is not None:
                raise StateError(
                    f"{self}: tile {missing[1]} of {missing[0]} was not written in this generation"
                )
            self.settle()
            if self._failure is not None:
                raise self._failure
            commit = Commit(step=step, state=dict(state), job=dict(job or {}))
            self._commit(commit)
        except BaseException as error:
            self.fail(error)
            raise
        self.committed = commit
        self._phase = "idle"

    def fail(self, error: BaseException) -> None:
        """Note that the generation being written is lost; only `rollback` and `close` work then."""
        if self._phase != "closed":
            self._phase = "failed"
            self._failure = error

    def rollback(self, step: int | None = None) -> None:
        """Return to a finished step after an error.

        Parameters
        ----------
        step
            The last commit, or the one before it; None is the last one.

        Raises
        ------
        StateError
            The tier overwrites in place, so the last commit is gone; or it does not hold `step`.
        TransferTimeoutError
            A transfer is still on its way.
        """
        self._require("writing", "failed")
        if not self.capabilities.rollback or self.committed is None:
            raise StateError(
                f"{self} has no finished step to go back to (it overwrites in place, or never "
                "committed); load a checkpoint into a new store"
            )
        # A read or write that comes back late must not find its slot or block in use again.
        self.settle()
        if step not in (None, self.committed.step):
            self.committed = self._rollback_to(step)
        self._rollback()
        self._phase = "idle"

    def snapshot(self, target: Path) -> None:
        """Write the current generation to another directory, as a store that zarr opens.

        Parameters
        ----------
        target
            Directory that becomes the zarr root; this rank adds its own group to it.

        Raises
        ------
        StateError
            Nothing committed, in the middle of a step, or this rank's group exists there already.
        CapacityError, TransferError
            What writing met; what was written of this rank's group is removed.
        """
        self._require("idle")
        if self.committed is None:
            raise StateError(f"{self}: nothing was committed yet, so there is nothing to keep")
        place = Path(target) / self.identity.directory_name
        if place.exists():
            raise StateError(f"{place} exists already, and nothing is ever overwritten there")
        self._snapshot(Path(target), self.committed)

    def freeze(self, name: str) -> None:
        """Keep the last commit under a name, without copying it, while training goes on.

        It takes milliseconds, and space only for what the coming steps can then not overwrite: at
        most one generation for each of the last two commits, reserved here, so that no step can
        fail for it. Release what is not needed any more before the next freeze: its files are used
        again.

        Parameters
        ----------
        name
            Up to 64 letters, digits, '-', '_' and '.', no '.' first: ``step-00000012``. On the
            file tiers it becomes the zarr group ``frozen/<name>`` in the rank's directory.

        Raises
        ------
        ConfigError
            Not a possible name.
        StateError
            The tier can't, the name is in use, nothing was committed, or in the middle of a step.
        CapacityError, TransferError
            No room, no hard links, or the system's error; nothing is frozen and nothing is left.
        """
        _check_frozen_name(name)
        self._require("idle")
        if self.committed is None:
            raise StateError(f"{self}: nothing was committed yet, so there is nothing to freeze")
        self._freeze(name, self.committed)

    def frozen(self) -> dict[str, Commit]:
        """What is frozen, by name, earlier steps first; an opened store has its own again."""
        self._require("idle", "writing", "failed")
        return self._frozen()

    def release(self, name: str) -> None:
        """Remove a frozen generation, which nobody may be reading any more.

        Large files take time to remove. Another thread than the one that trains may call it,
        also in the middle of a step.

        Raises
        ------
        ConfigError
            Not a possible name.
        StateError
            Nothing is frozen by that name.
        TransferError
            The system's error.
        """
        _check_frozen_name(name)
        self._require("idle", "writing", "failed")
        self._release(name)

    def frozen_files(self, name: str) -> Iterator[FrozenFile]:
        """Iterate over the files of a frozen generation, for a copy of it in another place.

        No byte of them changes until `release`. Written below a directory in the order and at the
        paths given, they are the same zarr group; the group's metadata, which says that it is
        whole and of which step, comes last.

        Raises
        ------
        ConfigError
            Not a possible name.
        StateError
            Nothing is frozen by that name.
        CorruptError
            Files of it are missing or too short.
        """
        _check_frozen_name(name)
        self._require("idle", "writing", "failed")
        return self._frozen_files(name)

    def open(self, path: Path, *, step: int | None = None) -> None:
        """Take up the last commit that an earlier process left in a rank's directory.

        Parameters
        ----------
        path
            The rank's directory.
        step
            Which step to take up, of those that the directory holds; None is the last commit.
            Later ones are forgotten.

        Raises
        ------
        StateError
            The tier is not durable, or the directory's state is in use or unfinished, or it does
            not hold `step`.
        CorruptError, LayoutError
            The directory does not hold what its records say.
        """
        self._require("new")
        raise StateError(f"the {self.tier} tier is memory: nothing of it can be opened again")

    def close(self, *, discard: bool = False) -> None:
        """Give back memory, threads and locks. Bytes at rest stay, if anything was committed.

        Parameters
        ----------
        discard
            Remove what this object allocated. A store that was opened is never removed.

        Raises
        ------
        TierStoreError
            The error of a write that was not reported yet.
        """
        if self._phase == "closed":
            return
        writing, self._phase = self._phase == "writing", "closed"
        if os.getpid() != self._owner_pid:
            # A forked child: threads, locks and files are its parent's.
            return
        try:
            # Memory is given back only when nothing copies from or to it any more.
            self.settle()
            self.device.synchronize()
            if writing and self._failure is not None:
                raise self._failure
        finally:
            self._close(discard or self.committed is None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return f"{self.tier} store of rank {self.identity.rank}"

    def _require(self, *phases: str) -> None:
        if self._phase in phases:
            return
        if self._phase == "failed":
            raise StateError(
                f"{self} failed ({self._failure}); roll it back or load a checkpoint"
            ) from self._failure
        said = {
            "new": "was not allocated yet",
            "idle": "is between steps",
            "writing": "is in the middle of a step",
            "closed": "is closed",
        }
        raise StateError(f"{self} {said[self._phase]}, so this call can't be served")

    def _keys(self, optimizer: str) -> Sequence[ArrayKey]:
        if optimizer not in self.optimizers:
            raise LayoutError(f"{self} has no optimizer {optimizer!r}")
        return self.optimizers[optimizer].keys()

    def _require_unwritten(self, key: ArrayKey, tile: int) -> None:
        if tile not in self._unwritten[key]:
            raise StateError(f"{self}: tile {tile} of {key} was written twice in one generation")

    def _check(self, key: ArrayKey, tile: int, tensor: torch.Tensor) -> None:
        entry = self.optimizers.get(key.optimizer)
        if entry is None or key.name not in entry.arrays:
            raise LayoutError(f"{self} has no array {key}")
        entry.layout.tile(tile)
        dtype = str(tensor.dtype).removeprefix("torch.")
        wanted = entry.layout.tile_numel, entry.arrays[key.name]
        if (tensor.numel(), dtype) != wanted or not tensor.is_contiguous():
            raise LayoutError(
                f"tile {tile} of {key} has {wanted[0]} contiguous elements of {wanted[1]}; the "
                f"tensor has {tensor.numel()} of {dtype}"
            )


def _check_frozen_name(name: str) -> None:
    if not _FROZEN_NAME.fullmatch(name) or name == "zarr.json":
        raise ConfigError(
            f"{name!r} can't be the name of a frozen generation: up to 64 letters, digits, '-', "
            "'_' and '.', with no '.' first, can (step-00000012), since it becomes the name of a "
            "directory"
        )
