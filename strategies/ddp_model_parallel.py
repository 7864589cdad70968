"""DDP with several devices per process, each process cutting its copy of the module across them."""

from dataclasses import fields
from typing import Any

import pytorch_lightning as pl
import pytorch_lightning.strategies as pl_strategies
import torch
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from .core.errors import ConfigError
from .core.patching import replaced
from .ddp import DDPStrategy
from .distributed.base import MultiProcessStrategy
from .distributed.device_blocks import num_processes, own_devices
from .distributed.wrapper import reduce_finished
from .pipeline.base import PipelineStrategy
from .pipeline.options import StageOptions

STAGE_OPTIONS = tuple(field.name for field in fields(StageOptions))


class PipelineInRanks(PipelineStrategy, pl_strategies.DDPStrategy):
    """Mixin for a DDP strategy, which handles the ranks; this class gives each rank a block of devices.

    Args:
        model_parallel_size: number of devices per process, and so of stages.
        **options: options of `StageOptions` and of the DDP strategy.

    Raises:
        ConfigError: an option has an invalid value, or the devices don't divide into blocks.
    """

    def __init__(self, model_parallel_size: int = 2, **options: Any) -> None:
        staged = {name: options.pop(name) for name in STAGE_OPTIONS if name in options}
        super().__init__(StageOptions(**staged), **options)
        self.model_parallel_size = model_parallel_size

    @classmethod
    def count_processes(cls, num_devices: int, model_parallel_size: int = 2, **_: Any) -> int:
        """Count the processes of a node: `num_devices / model_parallel_size`.

        Raises:
            ConfigError: the devices don't divide into blocks.
        """
        return num_processes(num_devices, model_parallel_size)

    @property
    @override
    def num_processes(self) -> int:
        return num_processes(len(self.parallel_devices or ()), self.model_parallel_size)

    @property
    @override
    def process_devices(self) -> list[torch.device]:
        assert self.parallel_devices is not None, "the trainer sets the devices"
        return own_devices(self.parallel_devices, self.local_rank, self.model_parallel_size)

    @property
    def calls_metrics_once(self) -> bool:
        """Whether a step calls a metric once, with all samples of this rank."""
        return self.stage_options.num_microbatches == 1

    @override
    def determine_ddp_device_ids(self) -> None:
        """Pass no device ids to DDP, which must not move the module."""

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._verify_one_type()
        num = self.stage_options.num_microbatches
        if num > 1:
            assert isinstance(self, MultiProcessStrategy)
            self.verify_batchnorm(trainer, f"num_microbatches={num}", "num_microbatches=1")
        super().setup(trainer)
        self.verify_threads()

    def _verify_one_type(self) -> None:
        """Refuse what torch's DDP can't reduce: parameters on devices of several types."""
        if len({device.type for device in self.process_devices}) > 1:
            raise ConfigError(
                f"{self.strategy_name}: the stages of a process are on {', '.join(map(str, self.process_devices))}, "
                "but DDP averages gradients on devices of one type only. Give each process GPUs or CPUs alone, or "
                "choose strategy=model_parallel."
            )

    def verify_threads(self) -> None:
        """Refuse DDP options that micro-batches in threads can't honour."""
        if self.finishes_later and self._ddp_kwargs.get("static_graph"):
            raise ConfigError(
                f"{self.strategy_name}: static_graph=True needs one backward pass per step, but micro-batches in "
                "threads have one each. Set static_graph=false, or deterministic=true."
            )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if not self.finishes_later:
            return super().training_step(*args, **kwargs)
        # each micro-batch has its own backward pass; DDP must not reduce before all gradients are summed
        with replaced(self.model, "require_backward_grad_sync", False):
            return super().training_step(*args, **kwargs)

    def _step_losses(self) -> list[Tensor]:
        """The losses of this step as they were logged; takes precedence over `DDPStrategy`'s."""
        return self._logged_losses

    @override
    def finish_backward(self) -> None:
        super().finish_backward()
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        reduce_finished(model)


class DDPModelParallelStrategy(PipelineInRanks, DDPStrategy):
    """Train with one process per block of devices; each cuts its copy of the module across its block.

    With 8 devices and `model_parallel_size=2` there are 4 processes, and rank r owns devices 2r and 2r + 1. Ranks work
    as in `DDPStrategy`, the devices of a block as in `ModelParallelStrategy`; it takes the arguments of both.
    """

    strategy_name = "ddp_model_parallel"
