"""Train with one process per device, cutting parameters, gradients and optimizer state over the ranks (FSDP2)."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import pytorch_lightning as pl
from torch.optim import Optimizer
from typing_extensions import override

from .balance.ranks import RankBalance
from .batch.layout import GlobalView
from .core.errors import ConfigError
from .core.options import Advice, Count, checked, hints_of
from .ranks.gradient_sync import GradientSync
from .ranks.shard_sync import ShardSync
from .ranks.strategy import RankStrategy
from .sharding.parts import Shard, ShardOptions
from .sharding.whole import gather_tree, place_shards, shard_entry, shard_like

GivenWeights = Annotated[
    Sequence[float],
    Advice(
        "They can't be measured: ranks wait for each other at every part of the module, so that all take the same time."
    ),
]


class FSDPStrategy(RankStrategy):
    """Train a module that is too large for one device, one process per device: each rank holds a part of everything.

    Every parameter, its gradient and its optimizer state are cut over the ranks, with torch's `fully_shard`. A part of
    the module is gathered when its forward runs, and released after it. Batches are divided as by `DDPStrategy`, and
    training equals one device's.

    Args:
        shard: the parts that are gathered one by one: `auto`, or names of submodules. The parameters that are in none
            of them are gathered for the whole step; with an empty list all are.
        reshard_after_forward: release a part after its forward and gather it again for its backward pass. Without it
            there is less to communicate, and the whole module is gathered between forward and backward.
        cpu_offload: keep shards, and so the optimizer's state, in host memory.
        replicas: number of groups of ranks that hold the whole module each; gradients are averaged over them.
        find_unused_parameters: allow parameters that take no part in the loss, which costs one small all-reduce per
            step; None: if the look at a few samples shows any.
        weights: share of each rank of a global batch, in any unit; None divides evenly.
        global_view: as in `DDPStrategy`.
        **options: options of `RankStrategy`. What `verify` compares is the module before it is cut; of layers of
            `configure_model` the loss, once they are cut.

    Raises:
        ConfigError: an option has an invalid value.
    """

    strategy_name = "fsdp"
    sync: ShardSync

    further_options = staticmethod(dict[str, Any])
    """None: `**options` of the constructor are `RankStrategy`'s."""

    @checked
    def __init__(
        self,
        shard: Shard = "auto",
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        replicas: Count = 1,
        find_unused_parameters: bool | None = None,
        weights: GivenWeights | None = None,
        global_view: GlobalView = "auto",
        **options: Any,
    ) -> None:
        if weights is not None and options.get("batch_size_is") != "global":
            raise ConfigError(
                "fsdp: weights divide a global batch, but batch_size_is=per_device gives each rank a batch of its own. "
                "Set batch_size_is=global, or weights=null."
            )
        known = [name for name in hints_of(RankStrategy.__init__) if name not in ("ddp_options", "return")]
        if unknown := [name for name in options if name not in known]:
            raise ConfigError(f"fsdp: {', '.join(unknown)} is unknown; choose from {', '.join(known)}.")
        super().__init__(**options)
        self.shards = ShardOptions(shard, reshard_after_forward, cpu_offload, replicas)
        self.find_unused_parameters = find_unused_parameters
        self.sync = ShardSync(self, self.shards, find_unused_parameters)
        self.whole_batches.allow(global_view, self._whole_batches, weights=weights is not None)
        self.balance = RankBalance(self.strategy_name, weights)

    def _whole_batches(self, by_rows: bool) -> GradientSync:
        from .ranks.global_view.view import WholeBatchOfShards  # most runs need none

        return WholeBatchOfShards(self, by_rows, self.shards, self.find_unused_parameters)

    @override
    @contextmanager
    def model_sharded_context(self) -> Generator[None]:
        with self.sync.creating(self.module):
            yield

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return self.sync.has_built  # asked before the layers are placed, and after it

    @override
    def _place(self, trainer: pl.Trainer) -> None:
        self.sync.place(trainer)

    def _whole(self, tree: Any) -> Any:
        """Whole tensors on rank 0, unless checkpoints are written in shards."""
        cut = getattr(self.checkpoint_io, "sharded", False)
        return tree if cut else gather_tree(tree, keep=self.is_global_zero)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._whole(super().lightning_module_state_dict())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._whole(super().optimizer_state(optimizer))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        io: Any = self.checkpoint_io
        if getattr(io, "sharded", False):
            io.save_shards(place_shards(checkpoint, self.is_global_zero), filepath, self)
        else:  # what is still sharded is of a callback, such as the weights of a moving average
            super().save_checkpoint(self._whole(checkpoint), filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if (load := getattr(self.checkpoint_io, "load_shards", None)) is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        return load(checkpoint_path, self.global_rank, self.num_together)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        own = self.module.state_dict()
        state = {name: shard_like(value, own.get(name)) for name, value in checkpoint["state_dict"].items()}
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states: list[dict[str, Any]] = []
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            entries = {i: shard_entry(entry, parameters[i]) for i, entry in state["state"].items()}
            states.append({**state, "state": entries})
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
