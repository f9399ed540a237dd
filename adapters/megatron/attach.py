"""Puts the state of Megatron's ``DistributedOptimizer`` on a tier, instance by instance."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tierstore.adapters.megatron.buckets import lay_out, owned_shards
from tierstore.adapters.megatron.guards import refuse_optimizers
from tierstore.adapters.megatron.loading import Loading
from tierstore.adapters.megatron.names import name_parameters
from tierstore.adapters.megatron.ranks import all_ranks
from tierstore.adapters.megatron.resume import Choice, choose, describe
from tierstore.adapters.megatron.tiered import TieredOptimizer
from tierstore.device import open_device
from tierstore.errors import ConfigError, StateError
from tierstore.metrics import readable
from tierstore.records import Identity
from tierstore.registry import tier_class
from tierstore.state import RankState

if TYPE_CHECKING:
    import torch

    from tierstore.config import TierConfig
    from tierstore.metrics import SweepMetrics
    from tierstore.ranks import Ranks

__all__ = ["Handle", "attach"]

_logger = logging.getLogger("tierstore.megatron")
_MOST_JOB_NBYTES = 64 * 1024
_Built = TypeVar("_Built")


class Handle:
    """What `attach` returns: counters, the state of a parameter, snapshots, and the end.

    Attributes
    ----------
    resumed_step
        The step of an earlier run that this one went on from, or None.
    rank_path, root
        This rank's zarr group and the store's root group, for the file tiers.
    """

    def __init__(self, state: RankState, tiered: list[TieredOptimizer], ranks: Ranks) -> None:
        self._ranks = ranks
        self._state = state
        self._tiered = tiered
        self.rank_path: Path | None = getattr(state.store, "path", None)
        self.root: Path | None = None if self.rank_path is None else self.rank_path.parent
        self.resumed_step: int | None = None
        self.window_nbytes = state.window.nbytes
        self.host_nbytes = state.store.host_nbytes

    @property
    def steps(self) -> int:
        """Training steps that were streamed and committed."""
        return self._state.step

    @property
    def sweeps(self) -> int:
        """Optimizer sweeps finished: one for each optimizer of the chain and step."""
        return self._state.sweeps

    @property
    def last(self) -> SweepMetrics | None:
        """Metrics of the last step."""
        return self._state.last

    @property
    def read_nbytes(self) -> int:
        """Bytes that all steps have read."""
        return self._state.total.read_nbytes

    @property
    def written_nbytes(self) -> int:
        """Bytes that all steps have written."""
        return self._state.total.written_nbytes

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of this rank's shard of a model parameter's state, read from the tier.

        Returns
        -------
        dict
            ``param``, ``exp_avg``, ``exp_avg_sq`` (flat, fp32), and ``step`` where the optimizer
            keeps it for each parameter.

        Raises
        ------
        ConfigError
            This rank owns no part of the parameter.
        """
        for tiered in self._tiered:
            if tiered.owns(parameter):
                return {name: value.clone() for name, value in tiered.read_state(parameter).items()}
        raise ConfigError("this rank owns no part of that parameter's optimizer state")

    @property
    def job_state(self) -> dict[str, Any]:
        """What goes with every commit from the next step on, and came with a resumed one.

        For whatever the trainer needs to go on: iteration, schedule, loss scaler. JSON values, a
        few kilobytes; set it before ``optimizer.step()``.
        """
        found: dict[str, Any] = json.loads(json.dumps(self._state.job))
        return found

    @job_state.setter
    def job_state(self, values: Mapping[str, Any]) -> None:
        text = json.dumps(dict(values), allow_nan=False)
        nbytes = len(text)
        if nbytes > _MOST_JOB_NBYTES:
            raise ConfigError(
                f"the job state has {nbytes:,} bytes as JSON, and {_MOST_JOB_NBYTES:,} are the "
                "most: it is written in every step. Keep what is larger elsewhere, and its place "
                "here"
            )
        # A copy: what is changed later is not what goes with this step.
        self._state.job = json.loads(text)

    def rollback(self) -> None:
        """Return to the last step that every rank has committed, after a failed step.

        All ranks call it. State, step counters, `job_state` and the model's weights are those of
        that step; what else the trainer has moved on (schedule, data, loss scaler) it has to move
        back itself.

        Raises
        ------
        PeerError
            A rank does not answer.
        StateError
            The tier overwrites in place, so the step is lost; or nothing failed.
        """
        for tiered in self._tiered:
            tiered.forget_loads()
        _together(self._ranks, self._state.rollback)
        self.restore_weights()

    def restore_weights(self) -> None:
        """Write the model's weights anew from the main params on the tier; all ranks call it."""
        _together(self._ranks, self._restore_own_weights)
        for chunk in dict.fromkeys(chunk for tiered in self._tiered for chunk in tiered.chunks):
            chunk.start_param_sync(force_sync=True)

    def _restore_own_weights(self) -> None:
        for tiered in self._tiered:
            tiered.flush()
            tiered.restore_weights()

    def load_from(self, location: Path | str, **options: Any) -> int:
        """Take the state from a store at rest: a snapshot, or what an ended run left.

        All ranks call it. It may have been saved with other data, tensor, pipeline and expert
        parallel sizes, tiles, chunks, and on another tier; parameters are matched by their global
        names and places. State, step counters, `job_state` and the model's weights are those of
        that store afterwards.

        Parameters
        ----------
        location
            Directory that has the ranks' groups, or a URL for fsspec.
        **options
            See `tierstore.saved.SavedStore`: ``frozen="step-00000012"``, ``directories=...``.

        Returns
        -------
        int
            The step that the state is of.

        Raises
        ------
        LayoutError
            Something is missing there, or of another shape: all of it is listed.
        CorruptError, TransferError
            What reading it met.
        PeerError, StateError
            It failed on another rank. After an error no rank has the new state: load again, or
            roll back where the tier can.
        """
        loading = _together(
            self._ranks,
            lambda: Loading(location, options, self._tiered, self._state.store),
        )
        loading.carry_out(self._state)
        for tiered in self._tiered:
            tiered.forget_loads()
        self.restore_weights()
        return loading.step

    def freeze(self, name: str) -> None:
        """Keep the state of the last step under a name while training goes on; all ranks call it.

        For the file tiers with recovery: hard links, so no bytes are copied. It lies in each
        rank's group as ``frozen/<name>``, until `release`.
        """
        self._state.freeze(name, self._tiered[0].flush)

    def frozen(self) -> dict[str, int]:
        """Names of what is frozen on this rank, and the step of each."""
        return {name: commit.step for name, commit in self._state.store.frozen().items()}

    def release(self, name: str) -> None:
        """Remove what is frozen under a name on this rank."""
        self._state.store.release(name)

    def snapshot(self, path: Path | str) -> Path:
        """Write the state of the last step to a directory, as a store that zarr opens.

        All ranks call it with the same directory; each adds its own group.
        """
        self._tiered[0].flush()
        self._state.store.snapshot(Path(path))
        return Path(path)

    def close(self) -> None:
        """End: give back memory, threads and locks. The optimizer can't step afterwards."""
        try:
            self._tiered[0].flush()
        finally:
            self._state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            # What broke the run is the news; what closing then meets is not.
            self._state.close()


def attach(optimizer: Any, config: TierConfig) -> Handle:
    """Move the state of a Megatron optimizer to a tier; from now on its steps stream.

    Call it on every rank, right after ``get_megatron_optimizer`` and before a checkpoint is
    loaded. No line of Megatron is changed: methods are bound on these instances, and Megatron's
    own step, clipping, scaler, schedules and parameter gather run as they are.

    Parameters
    ----------
    optimizer
        What ``get_megatron_optimizer`` returned: a ``DistributedOptimizer`` or a chain of them.
    config
        Tier, place, and memory.

    Raises
    ------
    ConfigError
        Options that would read or write the state behind the tier's back: each with its reason.
    CapacityError
        Not enough space or memory, on this rank or another one; nothing is left behind.
    OptimizerError
        The inner optimizer's update is not elementwise.
    """
    chain = [
        entry
        for entry in getattr(optimizer, "chained_optimizers", [optimizer])
        if not getattr(entry, "is_stub_optimizer", False)
    ]
    ranks = all_ranks(config.timeout_s)
    tiered = _together(ranks, lambda: _lay_out(chain, config))
    choice, path = _choose(ranks, tiered, config)
    longest = max(ranks.gather(len(tiered)))
    state = _together(
        ranks, lambda: _make_state(tiered, config, choice, path, ranks, longest), _discard
    )
    for entry in tiered:
        entry.state, entry.peers = state, tiered
    handle = Handle(state, tiered, ranks)
    for entry in tiered:
        entry.bind(handle)
    if path is not None and state.store.committed is not None:
        _restore_all(tiered, state.store.committed.state)
        handle.restore_weights()
        handle.resumed_step = choice.step
        _logger.info("%s: went on from step %d of run %s", state.store, choice.step, choice.nonce)
    layouts = [entry.layout for entry in state.optimizers.values()]
    _logger.info(
        "%s: %s of state, %s, window %s, host memory %s, tiles of %s and chunks of %s elements%s",
        state.store,
        readable(sum(entry.nbytes for entry in state.optimizers.values())),
        state.store.mode,
        readable(state.window.nbytes),
        readable(state.store.host_nbytes),
        max(layout.tile_numel for layout in layouts),
        max(layout.chunk_numel for layout in layouts),
        f", in {handle.rank_path}" if handle.rank_path else "",
    )
    return handle


def _lay_out(chain: list[Any], config: TierConfig) -> list[TieredOptimizer]:
    refuse_optimizers(chain)
    if not chain:
        raise ConfigError("this rank has no optimizer: every parameter is frozen")
    _warn_of_copied_gradients(chain)
    chunks = list(dict.fromkeys(chunk for entry in chain for chunk in entry.model_chunks))
    names = name_parameters(chunks)
    tiered = []
    for index, entry in enumerate(chain):
        owned, numel = owned_shards(entry, names)
        layout = lay_out(owned, numel, config)
        tiered.append(TieredOptimizer(f"opt-{index}", entry, owned, layout))
    return tiered


def _choose(
    ranks: Ranks, tiered: list[TieredOptimizer], config: TierConfig
) -> tuple[Choice, Path | None]:
    """Which earlier run's state to take up, and where this rank has it; or the nonce of a new run.

    Every rank comes to the same choice, or error.
    """
    if config.resume == "never":
        return _new_run(ranks), None
    layouts = {entry.name: entry.optimizer_layout.fingerprint for entry in tiered}
    offers = tier_class(config.tier).offers(config, _place()["rank"])
    choice = choose(ranks.gather(describe(offers, layouts)))
    if choice.step >= 0:
        return choice, next(offer.path for offer in offers if offer.nonce == choice.nonce)
    reasons = "\n".join(f"  - {reason}" for reason in choice.reasons)
    if config.resume == "require":
        raise ConfigError(f"--optimizer-state-resume=require: nothing to resume\n{reasons}")
    _logger.warning("nothing to resume, starting afresh:\n%s", reasons)
    return _new_run(ranks), None


def _new_run(ranks: Ranks) -> Choice:
    """A nonce drawn by one rank for all of them."""
    return Choice(ranks.gather(secrets.token_hex(4))[0])


def _make_state(
    tiered: list[TieredOptimizer],
    config: TierConfig,
    choice: Choice,
    path: Path | None,
    ranks: Ranks,
    chain_length: int,
) -> RankState:
    device = open_device(tiered[0].device)
    identity = Identity(nonce=choice.nonce, **_place())
    store = tier_class(config.tier)(config, device, identity)
    try:
        if path is not None:
            store.open(path, step=choice.step)
        state = RankState(
            store,
            [entry.optimizer_layout for entry in tiered],
            counters=lambda: {entry.name: entry.counters() for entry in tiered},
            restore=partial(_restore_all, tiered),
            ranks=ranks,
            chain_length=chain_length,
        )
        if path is None:
            state.fill({entry.name: entry.fill for entry in tiered})
        elif store.committed is not None:
            for entry in tiered:
                entry.require_counters(store.committed.state[entry.name])
    except BaseException:
        store.close(discard=True)
        raise
    return state


def _discard(state: RankState) -> None:
    state.close(discard=True)


def _restore_all(tiered: list[TieredOptimizer], counters: Mapping[str, Any]) -> None:
    for entry in tiered:
        entry.restore(counters[entry.name])


def _warn_of_copied_gradients(chain: list[Any]) -> None:
    import torch

    numel = sum(
        buffer.grad_data.numel() // entry.data_parallel_group.size()
        for entry in chain
        for buffer in entry.buffers
        if buffer.grad_dtype != torch.float32
    )
    if numel:
        _logger.warning(
            "gradients are reduced in 16 bits: Megatron copies this rank's part of them to fp32 "
            "for the step, %s of device memory; --accumulate-allreduce-grads-in-fp32 (or "
            "grad_reduce_in_fp32) needs no copy",
            readable(numel * 4),
        )


def _place() -> dict[str, Any]:
    """Rank and parallel sizes of this process."""
    import torch
    from megatron.core import parallel_state

    if not torch.distributed.is_initialized():
        return {"rank": 0, "topology": {"world_size": 1}}
    topology = {"world_size": torch.distributed.get_world_size()}
    for name in ("tensor_model_parallel", "pipeline_model_parallel", "data_parallel"):
        topology[f"{name}_size"] = getattr(parallel_state, f"get_{name}_world_size")()
        topology[f"{name}_rank"] = getattr(parallel_state, f"get_{name}_rank")()
    topology["expert_model_parallel_size"] = parallel_state.get_expert_model_parallel_world_size()
    topology["expert_model_parallel_rank"] = parallel_state.get_expert_model_parallel_rank()
    return {"rank": torch.distributed.get_rank(), "topology": topology}


def _together(
    ranks: Ranks, build: Callable[[], _Built], undo: Callable[[_Built], None] = lambda built: None
) -> _Built:
    """Build on every rank, or raise on every rank: none is left waiting in a collective."""
    built: list[_Built] = []
    failure = None
    try:
        built.append(build())
    except Exception as error:  # raised below, when every rank knows
        failure = error
    failures = ranks.gather(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    elsewhere = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
    if elsewhere:
        undo(built[0])
        raise StateError("it failed on other ranks:\n" + "\n".join(elsewhere))
    return built[0]
