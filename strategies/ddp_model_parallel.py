"""DDP with several devices per process, each process cutting its copy of the module across them; batches, too."""

from functools import partial
from typing import Any, ClassVar

from .balance.controller import Hysteresis
from .balance.ranks import RankBalance, Weights
from .core.options import Count, checked, hints_of
from .ddp import DDPStrategy, divided
from .pipeline.options import StageOptions


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
