"""Train with one process per device, averaging gradients by torch's DistributedDataParallel, weighted by samples.

`balanced_ddp` divides every global batch by fixed or measured shares, for ranks of unequal speed.
"""

from functools import partial
from typing import Any, ClassVar

from .balance.controller import Hysteresis
from .balance.ranks import RankBalance, Weights
from .batch.layout import GlobalView
from .batch.structure import BatchDims
from .core.errors import ConfigError
from .core.options import Count, checked, hints_of
from .data.loaders import BatchSizeIs
from .distributed.wrapper import Compression, compression_hook, reducer_options
from .pipeline.recompute import RecomputeOption
from .pipeline.stages import StageOptions
from .ranks.gradient_sync import GradientSync
from .ranks.strategy import RankStrategy


class DDPStrategy(RankStrategy):
    """Train with one process per device, each on its own part of every global batch.

    Training equals one device's on the same global batch: no sample is dropped or read twice, and each rank's gradient
    is weighted by its samples (or by the `loss_weight` that the module returns). Evaluation sees every sample once.

    Under `train.py`, torchrun, SLURM or Kubeflow the processes exist already. In a plain script the trainer starts
    them, by fork on CPU and by spawn on accelerators (or `start_method`), so that it does not run once per device.

    Args:
        batch_size_is: meaning of the loader's batch. `per_device`: the batch of one rank; the global batch is that
            times the number of ranks. `global`: the global batch, divided among the ranks.
        devices_per_process: number of devices per process; its batch is cut among replicas on them.
        batch_dims: which dimensions of the batch are samples, by path, where that can't be found out.
        shard_optimizer: cut the optimizers' state over the ranks (ZeRO, stage 1): each updates some of the parameters.
        recompute: parts of the module whose activations are computed once more in the backward pass: `never`,
            `always`, `except_last`, or names of submodules.
        verify: find out, before the first step, whether the module trains otherwise in parts of a batch than on the
            whole one, for which at most eight samples of the dataset are tried. False trains it in parts nevertheless.
        compression: compression of gradients between ranks: `fp16`, `bf16`, `powersgd`, or None.
        global_view: have steps see the global batch, of which each rank computes some rows: any module trains as on one
            device, BatchNorm and random numbers included, but more slowly. `auto` does so for a module that trains
            otherwise in parts of a batch, where options allow it, else each rank computes all rows; False refuses it.
            See docs/global_view.md.
        **options: options of `RankStrategy` (`timeout_s`, `start_method`, ...) and of
            `torch.nn.parallel.DistributedDataParallel`: `find_unused_parameters`, `static_graph`,
            `gradient_as_bucket_view`, `bucket_cap_mb`, ...

    Raises:
        ConfigError: an option has an invalid value.
    """

    strategy_name = "ddp"

    further_options = staticmethod(reducer_options)
    """The options that `**options` of the constructor may hold beside `RankStrategy`'s, with their annotations."""

    @checked
    def __init__(
        self,
        batch_size_is: BatchSizeIs = "per_device",
        devices_per_process: Count = 1,
        batch_dims: BatchDims | None = None,
        shard_optimizer: bool = False,
        recompute: RecomputeOption = "never",
        verify: bool = True,
        compression: Compression | None = None,
        global_view: GlobalView = "auto",
        **options: Any,
    ) -> None:
        if devices_per_process > 1 and self.stage_options is None and options.get("static_graph"):
            raise ConfigError(
                f"ddp: static_graph=true can't be recorded with devices_per_process={devices_per_process}, whose "
                "replicas have a backward pass of their own. Set static_graph=false, or devices_per_process=1."
            )
        super().__init__(batch_size_is, batch_dims, recompute, verify=verify, **options)
        self.devices_per_process = devices_per_process
        self.shard_optimizer = shard_optimizer
        self.sync = GradientSync(self, compression_hook(compression))
        self.whole_batches.allow(
            global_view, self._whole_batches, devices_per_process=devices_per_process > 1,
            shard_optimizer=shard_optimizer, compression=compression is not None,
        )  # fmt: skip

    def _whole_batches(self, by_rows: bool) -> GradientSync:
        from .ranks.global_view.view import WholeBatch  # most runs need none

        return WholeBatch(self, by_rows)


class BalancedDDPStrategy(DDPStrategy):
    """`DDPStrategy` that divides each global batch, which is the loader's batch, among the ranks by weights.

    Gradients stay exact, because each rank's is weighted by its samples. With `auto` each rank measures the time of its
    own forward and backward passes, without the wait for others; the ranks exchange these (a few numbers, in one step
    of twenty) and change their shares at the same global batch. Shares are logged as `balance/...` and saved in
    checkpoints.

    Args:
        weights: share of each rank, in any unit (samples per second, for example), or `auto`.
        hysteresis: fraction of the slowest rank's time that new shares must save to be adopted.
        **options: options of `DDPStrategy`, except `batch_size_is`.

    Raises:
        ConfigError: an option has an invalid value.
    """

    strategy_name = "balanced_ddp"

    @checked
    def __init__(self, weights: Weights = "auto", hysteresis: Hysteresis = 0.05, **options: Any) -> None:
        super().__init__(**divided(options))
        self.balance = RankBalance(self.strategy_name, weights, hysteresis)


def divided(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `DDPStrategy` for batches that are divided; refuse the one value that divides nothing."""
    if options.get("batch_size_is", "global") != "global":
        raise ConfigError(
            "balanced_ddp: batch_size_is=per_device was given, but the batch is always divided. Remove the option."
        )
    return {**options, "batch_size_is": "global"}


class DDPModelParallelStrategy(DDPStrategy):
    """Train with one process per block of devices; each cuts its copy of the module across its block.

    With 8 devices and `model_parallel_size=2` there are 4 processes, and rank r owns devices 2r and 2r + 1. Ranks work
    as in `DDPStrategy`, the devices of a block as in `ModelParallelStrategy`; it takes the arguments of both.

    Args:
        model_parallel_size: number of devices per process, and so of stages.
        **options: options of `StageOptions` and of `DDPStrategy`.

    Raises:
        ConfigError: an option has an invalid value, or the devices don't divide into blocks.
    """

    strategy_name = "ddp_model_parallel"
    size_option: ClassVar[tuple[str, int]] = ("model_parallel_size", 2)
    further_options = staticmethod(partial(hints_of, StageOptions))

    @checked
    def __init__(self, model_parallel_size: Count = 2, **options: Any) -> None:
        self.stage_options = StageOptions.taken_from(options)
        super().__init__(devices_per_process=model_parallel_size, **options)


class BalancedDDPModelParallelStrategy(DDPStrategy):
    """`DDPModelParallelStrategy` that divides each global batch among ranks by fixed or measured weights.

    Ranks work as in `BalancedDDPStrategy`, the devices of a block as in `ModelParallelStrategy`; it takes the arguments
    of both.
    """

    strategy_name = "balanced_ddp_model_parallel"
    size_option: ClassVar[tuple[str, int]] = ("model_parallel_size", 2)
    further_options = staticmethod(partial(hints_of, StageOptions))

    @checked
    def __init__(
        self,
        weights: Weights = "auto",
        hysteresis: Hysteresis = 0.05,
        model_parallel_size: Count = 2,
        **options: Any,
    ) -> None:
        self.stage_options = StageOptions.taken_from(options)
        super().__init__(devices_per_process=model_parallel_size, **divided(options))
        self.balance = RankBalance(self.strategy_name, weights, hysteresis)
