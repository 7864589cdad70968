"""DDP for blocks of devices of unequal speed: divides every global batch among the blocks by their shares."""

from functools import partial
from typing import Any, ClassVar

from .balance.controller import Hysteresis
from .balance.ranks import RankBalance, Weights
from .balanced_ddp import divided
from .core.options import Count, checked, hints_of
from .ddp import DDPStrategy
from .pipeline.options import StageOptions


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
