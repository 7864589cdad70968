"""Type the keyword arguments that the strategies of ranks pass on, so that a type checker finds a misspelt one.

At run time `RankStrategy`, torch's DistributedDataParallel and the constructors decide; a test compares their names.
"""

from typing import Any

from typing_extensions import TypedDict

from ..batch.batch_dims import BatchDims
from ..data.loaders import BatchSizeIs
from ..distributed.options import Compression
from ..distributed.scripts.launcher import StartMethod
from ..pipeline.recompute import RecomputeOption


class RankArguments(TypedDict, total=False):
    """Options of `RankStrategy` and of torch's wrapper that `DDPStrategy` passes on."""

    timeout_s: float
    backend: str | None
    sync_batchnorm: bool
    start_method: StartMethod | None
    gather_lists_mb: float
    dim: int
    broadcast_buffers: bool | None
    bucket_cap_mb: float | None
    bucket_cap_mb_list: list[int] | None
    find_unused_parameters: bool | None
    check_reduction: bool | None
    gradient_as_bucket_view: bool | None
    static_graph: bool | None
    delay_all_reduce_named_params: Any
    param_to_hook_all_reduce: Any
    mixed_precision: Any
    device_mesh: Any
    skip_all_reduce_unused_params: bool | None
    batched_grad_copy: bool | None
    forward_sync_buffers: bool | None


class DDPArguments(RankArguments, total=False):
    """Options of `DDPStrategy`, which the strategies derived from it pass on."""

    batch_size_is: BatchSizeIs
    batch_dims: BatchDims | None
    shard_optimizer: bool
    recompute: RecomputeOption
    verify: bool
    compression: Compression | None
