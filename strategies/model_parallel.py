"""Train one copy of a module, cut across the devices of one process."""

from collections.abc import Sequence
from typing import Literal

import pytorch_lightning as pl
from typing_extensions import override

from .batch.losses import LossReduction
from .batch.one_process import OneProcessStrategy
from .batch.structure import BatchDims
from .core.types import Device
from .pipeline.layout import StageLayout
from .pipeline.options import Overlap, Partition, ScheduleName, StageOptions
from .pipeline.recompute import Recompute, RecomputeOption


class ModelParallelStrategy(OneProcessStrategy):
    """Train a module that is too large for one device: each device holds one stage of it.

    Args:
        devices: one per stage; devices may repeat and mix. None takes the trainer's (`accelerator=`, `devices=`).
        partition: how the module is cut: `auto`, `manual`, or the names of the first module of each later stage.
        num_microbatches: number of micro-batches per training batch, which run on different stages at the same time.
        schedule: order of the micro-batches on each stage, `1f1b` or `gpipe`.
        overlap: how stages work at the same time, `launch` or `threads`; None decides by the devices.
        output_device: device of batch, outputs and loss: `last` or `first`.
        optimizer_copies: tensors of a parameter's size that the optimizer keeps per trainable parameter.
        balance: what `auto` balances, `memory` or `time` (measured in the first steps).
        device_weights: relative capacities of unequal devices, one per stage.
        profile_activations: whether `auto` also counts activations saved for backward.
        loss_reduction: reduction of the module's loss, `mean` or `sum`.
        deterministic: whether random numbers are taken in the same order in every run; None follows torch.
        batch_dims: which dimensions of the batch are samples, by path, where that can't be found out.
        recompute: parts of the module whose activations are computed once more in the backward pass: `never`,
            `always`, `except_last`, or names of submodules.

    See `StageOptions` for details.

    Raises:
        ConfigError: an option has an invalid value, or the trainer has no devices.
    """

    strategy_name = "model_parallel"

    def __init__(
        self,
        devices: Sequence[Device] | None = None,
        partition: Partition = "auto",
        num_microbatches: int = 1,
        schedule: ScheduleName = "1f1b",
        overlap: Overlap | None = None,
        output_device: Literal["last", "first"] = "last",
        optimizer_copies: float = 2,
        balance: Literal["memory", "time"] = "memory",
        device_weights: Sequence[float] | None = None,
        profile_activations: bool = False,
        loss_reduction: LossReduction = "mean",
        deterministic: bool | None = None,
        batch_dims: BatchDims | None = None,
        recompute: RecomputeOption = "never",
    ) -> None:
        super().__init__(devices, batch_dims)
        self.recompute = Recompute(recompute, self.strategy_name)
        self.stage_options = StageOptions(
            partition=partition,
            num_microbatches=num_microbatches,
            schedule=schedule,
            overlap=overlap,
            output_device=output_device,
            optimizer_copies=optimizer_copies,
            balance=balance,
            device_weights=device_weights,
            profile_activations=profile_activations,
            loss_reduction=loss_reduction,
            deterministic=deterministic,
        )

    @override
    def new_layout(self) -> StageLayout:
        options = self.recompute.stage_options(self.stage_options, self.process_devices)
        return StageLayout(self.process_devices, options, self.strategy_name)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self.recompute.begin(trainer, self.stage_options.partition)
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        super().teardown()
        self.recompute.end()
