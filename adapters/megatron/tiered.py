"""One ``DistributedOptimizer`` whose state is on a tier: the methods that are bound to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tierstore.binding import ShardUpdate
from tierstore.records import OptimizerLayout
from tierstore.update import step_hooks, study

if TYPE_CHECKING:
    import torch

    from tierstore.adapters.megatron.attach import Handle
    from tierstore.adapters.megatron.buckets import OwnedShard
    from tierstore.layout import StateLayout
    from tierstore.state import RankState
    from tierstore.stream import TileViews

__all__ = ["TieredOptimizer"]


class TieredOptimizer:
    """Stands between one ``DistributedOptimizer`` and its arrays.

    Parameters
    ----------
    name
        ``opt-<place in the chain>``.
    optimizer
        Megatron's.
    owned
        The shards of this rank, in array order.
    layout
        Their grid.

    Attributes
    ----------
    device, chunks
        Where weights and gradients are; the model chunks that they belong to.
    state, peers
        Set once the store is allocated: what the rank holds, and all optimizers of the chain.
    """

    state: RankState
    peers: list[TieredOptimizer]

    def __init__(
        self, name: str, optimizer: Any, owned: list[OwnedShard], layout: StateLayout
    ) -> None:
        self.name = name
        self._optimizer = optimizer
        self._inner = optimizer.optimizer
        self._owned = owned
        self._index = {entry.parameter: index for index, entry in enumerate(owned)}
        self.device = optimizer.buffers[0].grad_data.device
        self.chunks = optimizer.model_chunks
        self._habit = study(self._inner, self.device)
        self._arrays = ("main", *self._habit.arrays)
        self.optimizer_layout = OptimizerLayout(
            name=name, layout=layout, arrays=dict.fromkeys(self._arrays, "float32")
        )
        self._update = ShardUpdate(
            self._inner, layout, self._habit, [entry.bound for entry in owned]
        )
        # Tensors that a checkpoint load has set and that are not on the tier yet, by shard.
        self._staged: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def _layout(self) -> StateLayout:
        return self.optimizer_layout.layout

    @property
    def n_groups(self) -> int:
        """Param groups of the inner optimizer."""
        return len(self._inner.param_groups)

    def forget_loads(self) -> None:
        """Drop what `set_state` has set and nobody has written yet."""
        self._staged.clear()

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank holds a shard of the parameter here."""
        return parameter in self._index

    def counters(self) -> dict[str, Any]:
        """Step counters as JSON values."""
        return self._update.counters()

    def require_counters(self, counters: Mapping[str, Any]) -> None:
        """See `ShardUpdate.require_counters`."""
        self._update.require_counters(counters)

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Set step counters to what `counters` gave earlier."""
        self._update.restore(counters)

    def bind(self, handle: Handle) -> None:
        """Let go of the resident state and put the tier's methods in Megatron's place."""
        import torch

        for entry in self._owned:
            main = entry.bound.main
            # Never empty: Megatron takes an empty state for an optimizer that has to be given
            # full-size tensors.
            self._inner.state[main] = {}
            if not entry.bound.weight_is_main:
                # Keeps shape, device and a place for the gradient, holds four bytes, reads as NaN
                # and (with more than one element) refuses to be written.
                nan = torch.full((1,), float("nan"), dtype=main.dtype, device=main.device)
                main.data = nan.expand(main.shape)
        self._update.reset()
        bound = self._optimizer
        self._inner.step = self.step
        bound._copy_main_params_to_model_params = _nothing
        bound._copy_model_params_to_main_params = self.refresh_main
        bound._get_main_param_and_optimizer_states = self.read_state
        bound._set_main_param_and_optimizer_states = self.set_state
        bound.offload_to_cpu = bound.restore_from_cpu = _nothing
        bound.tierstore_handle = handle

    def fill(self, views: TileViews) -> None:
        """Put the main params on a tile whose moments are zeros, as they are before step 1."""
        for extent in self._layout.extents(views.tile.index):
            main = self._owned[extent.shard].bound.main.detach()
            views.arrays["main"][extent.in_tile].copy_(main[extent.in_shard])

    def restore_weights(self) -> None:
        """Write the weights that the state on the tier stands for, of this rank's shards."""

        def put(views: TileViews) -> None:
            for extent in self._layout.extents(views.tile.index):
                part = views.arrays["main"][extent.in_tile]
                self._owned[extent.shard].bound.weight[extent.in_shard].copy_(part)

        self.state.look(self.name, put, range(self._layout.n_tiles))

    def step(self, closure: None = None) -> None:
        """The inner optimizer's step: stream all tiles through the update."""
        with step_hooks(self._inner):
            self.state.advance(self.name, self._update.visit, self._update.finish, self._prepare)

    def _prepare(self) -> None:
        self.flush()
        self._update.begin()

    def read_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """What Megatron's ``_get_main_param_and_optimizer_states`` returns, read from the tier."""
        import torch

        self.flush()
        index = self._index[parameter]
        bound = self._owned[index].bound
        found = {
            name: torch.empty(bound.main.shape, dtype=torch.float32, device=bound.weight.device)
            for name in self._arrays
        }

        def take(views: TileViews) -> None:
            for extent in self._layout.extents(views.tile.index):
                if extent.shard == index:
                    for name, whole in found.items():
                        whole[extent.in_shard].copy_(views.arrays[name][extent.in_tile])

        self.state.look(self.name, take, self._layout.tiles_of(index))
        main = found.pop("main")
        scalars = {
            name: self._inner.state[bound.main][name].clone() for name in self._habit.scalars
        }
        return {"param": bound.weight if bound.weight_is_main else main, **scalars, **found}

    def set_state(self, parameter: torch.Tensor, tensors: dict[str, Any]) -> None:
        """Megatron's ``_set_main_param_and_optimizer_states``: a checkpoint load, shard by shard.

        Copies are kept in host memory until the next step, read or snapshot writes them all to a
        new generation.
        """
        import torch

        index = self._index[parameter]
        bound = self._owned[index].bound
        staged = self._staged.setdefault(index, {})
        for name in ("param", *self._habit.arrays):
            value = tensors[name]
            if isinstance(value, torch.Tensor):
                staged["main" if name == "param" else name] = value.detach().to("cpu", copy=True)
        if bound.weight_is_main and "main" in staged:
            bound.weight.copy_(staged["main"])
        for name in self._habit.scalars:
            if isinstance(tensors.get(name), torch.Tensor):
                self._inner.state[bound.main][name].copy_(tensors[name])

    def flush(self) -> None:
        """Write what a load has set in any optimizer of the chain, as one generation.

        Of the whole chain, because the first optimizer that steps begins a generation, and then
        nothing but a step may be written to it.
        """
        loaded = [peer for peer in self.peers if peer._staged]
        if loaded:
            self.state.rewrite({peer.name: peer._put_staged for peer in loaded})
            for peer in loaded:
                peer._staged.clear()

    def _put_staged(self, views: TileViews) -> None:
        for extent in self._layout.extents(views.tile.index):
            for name, whole in self._staged.get(extent.shard, {}).items():
                views.arrays[name][extent.in_tile].copy_(whole[extent.in_shard])

    def refresh_main(self, state_dict: dict[str, Any] | None = None) -> None:
        """Megatron's ``_copy_model_params_to_main_params``: weights, or a state dict's, to main."""
        sources = {entry.parameter: entry.parameter for entry in self._owned}
        if state_dict is not None:
            sources = self._optimizer._build_model_param_to_state_dict_param_map(state_dict)
        for staged in self._staged.values():
            staged.pop("main", None)

        def put(views: TileViews) -> None:
            for extent in self._layout.extents(views.tile.index):
                entry = self._owned[extent.shard]
                whole = sources[entry.parameter].detach().view(-1)[entry.shard.param_start :]
                part = whole[extent.in_shard]
                views.arrays["main"][extent.in_tile].copy_(part)
                if entry.bound.weight_is_main:
                    entry.bound.weight[extent.in_shard].copy_(part)

        self.state.rewrite({self.name: put})


def _nothing(*_: Any, **__: Any) -> None:
    """What Megatron would do here is done tile by tile, or has nothing left to do."""
