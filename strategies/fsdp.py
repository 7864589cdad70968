"""Train with one process per device, cutting parameters, gradients and optimizer state over the ranks (FSDP2)."""

from collections.abc import Sequence
from typing import Annotated

from .balance.ranks import RankBalance
from .batch.batch_dims import BatchDims
from .core.options import Advice, Count, Positive, checked
from .data.loaders import BatchSizeIs
from .distributed.scripts.launcher import StartMethod
from .pipeline.recompute import RecomputeOption
from .ranks.shard_sync import ShardSync
from .ranks.strategy import RankStrategy
from .sharding.refusals import verify_batches
from .sharding.sharded_module import Shard, ShardOptions

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
            step.
        weights: share of each rank of a global batch, in any unit; None divides evenly.
        batch_size_is: as in `DDPStrategy`.
        batch_dims: as in `DDPStrategy`.
        timeout_s: as in `DDPStrategy`.
        backend: as in `DDPStrategy`.
        sync_batchnorm: as in `DDPStrategy`.
        start_method: as in `DDPStrategy`.
        recompute: as in `DDPStrategy`.
        verify: as in `DDPStrategy`; before the module is cut, so that a module made on the meta device is not verified.
        gather_lists_mb: as in `RankStrategy`.

    Raises:
        ConfigError: an option has an invalid value.
    """

    strategy_name = "fsdp"

    @checked
    def __init__(
        self,
        shard: Shard = "auto",
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        replicas: Count = 1,
        find_unused_parameters: bool = False,
        weights: GivenWeights | None = None,
        batch_size_is: BatchSizeIs = "per_device",
        batch_dims: BatchDims | None = None,
        timeout_s: Positive = 1800.0,
        backend: str | None = None,
        sync_batchnorm: bool = False,
        recompute: RecomputeOption = "never",
        start_method: StartMethod | None = None,
        verify: bool = True,
        gather_lists_mb: Positive = 1024.0,
    ) -> None:
        verify_batches(weights, batch_size_is)
        super().__init__(
            batch_size_is, batch_dims, recompute, timeout_s, backend, sync_batchnorm, start_method, verify,
            gather_lists_mb=gather_lists_mb,
        )  # fmt: skip
        self.shards = ShardOptions(shard, reshard_after_forward, cpu_offload, replicas)
        self.sync = ShardSync(self, self.shards, find_unused_parameters)
        if weights is not None:
            self.balance = RankBalance(self.strategy_name, weights, hysteresis=0.0)
