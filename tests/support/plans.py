"""Strategies by name, with their numbers of devices or ranks: each must train as one device does (law 1)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from evener.strategies import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)

Plan = tuple[int, Callable[..., Any]]


def balanced(**policy: Any) -> Callable[..., Any]:
    return lambda **options: BalancedDataParallelStrategy(**policy, **options)


PLANS: dict[str, Plan] = {
    **{f"dp-{num}": (num, DataParallelStrategy) for num in range(1, 5)},
    "dp-threads": (3, lambda **options: DataParallelStrategy(threads=True, **options)),
    "dp-of-stages-2x2": (4, partial(DataParallelStrategy, model_parallel_size=2)),
    "dp-of-stages-3x2-threads": (6, partial(DataParallelStrategy, model_parallel_size=2, threads=True)),
    "balanced_dp-gpu0_chunk=0": (3, balanced(gpu0_chunk=0)),
    "balanced_dp-gpu0_chunk=1": (2, balanced(gpu0_chunk=1)),
    "balanced_dp-weights=1,0,3": (3, balanced(weights=[1, 0, 3])),
    "balanced_dp-weights=0,1": (2, balanced(weights=[0, 1])),
    "balanced_dp-auto": (2, balanced(weights="auto")),
    **{f"model_parallel-2-{m}": (2, partial(ModelParallelStrategy, num_microbatches=m)) for m in range(1, 5)},
}
"""Number of devices and strategy, by name; for model_parallel devices are stages, then come micro-batches."""

Ranks = partial(DDPStrategy, batch_size_is="global", timeout_s=120)
Shards = partial(FSDPStrategy, batch_size_is="global", timeout_s=120)

RANK_PLANS: dict[str, Plan] = {
    **{f"fsdp-{num}": (num, Shards) for num in (2, 1, 3)},
    **{f"fsdp-{num}-kept": (num, partial(Shards, reshard_after_forward=False)) for num in (1, 2, 3)},
    "fsdp-4-replicas=2": (4, partial(Shards, replicas=2)),
    "fsdp-2-weights=3,1": (2, partial(Shards, weights=[3, 1])),
    "fsdp-3-weights=1,0,3": (3, partial(Shards, weights=[1, 0, 3])),
    "fsdp-2-cpu_offload": (2, partial(Shards, cpu_offload=True)),
    **{f"ddp-{num}-shard_optimizer": (num, partial(Ranks, shard_optimizer=True)) for num in (2, 3)},
}
"""Number of ranks and strategy, by name."""
