"""Train one copy of a module, cut across the devices of one process."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import pytorch_lightning as pl
from typing_extensions import override

from .batch.layout import OrWhole
from .batch.one_process import OneProcessStrategy
from .batch.structure import BatchDims
from .core.options import checked, hints_of
from .core.types import Device
from .pipeline.layout import StageLayout
from .pipeline.recompute import Recompute, RecomputeOption
from .pipeline.stages import StageOptions


class ModelParallelStrategy(OneProcessStrategy):
    """Train a module that is too large for one device: each device holds one stage of it.

    Args:
        devices: one per stage; devices may repeat and mix. None takes the trainer's (`accelerator=`, `devices=`).
        batch_dims: which dimensions of the batch are samples, by path, where that can't be found out.
        recompute: parts of the module whose activations are computed once more in the backward pass: `never`,
            `always`, `except_last`, or names of submodules.
        verify: as in `DDPStrategy`, for micro-batches.
        global_view: give a module that trains otherwise in micro-batches, or whose batches can't be cut, whole batches
            (`auto`); False refuses it.
        **options: options of `StageOptions`: `partition`, `num_microbatches`, `schedule`, ...

    Raises:
        ConfigError: an option has an invalid value, or the trainer has no devices.
    """

    strategy_name = "model_parallel"
    computes_whole = "without micro-batches"

    further_options = staticmethod(partial(hints_of, StageOptions))

    @checked
    def __init__(
        self,
        devices: Sequence[Device] | None = None,
        batch_dims: BatchDims | None = None,
        recompute: RecomputeOption = "never",
        verify: bool = True,
        global_view: OrWhole = "auto",
        **options: Any,
    ) -> None:
        super().__init__(devices, batch_dims, verify, global_view)
        self.recompute = Recompute(recompute, self.strategy_name)
        self.stage_options = StageOptions(**options)

    @cached_property
    @override
    def layout(self) -> StageLayout:
        return StageLayout(self.process_devices, self.stage_options, self.strategy_name)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self.recompute.begin(trainer, self.stage_options.partition)
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        super().teardown()
        self.recompute.end()
