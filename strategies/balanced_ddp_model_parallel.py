"""DDP for blocks of devices of unequal speed: divides every global batch among the blocks by their shares."""

from .balanced_ddp import BalancedDDPStrategy
from .ddp_model_parallel import PipelineInRanks


class BalancedDDPModelParallelStrategy(PipelineInRanks, BalancedDDPStrategy):
    """`DDPModelParallelStrategy` that divides each global batch among ranks by fixed or measured weights.

    Ranks work as in `BalancedDDPStrategy`, the devices of a block as in `ModelParallelStrategy`; it takes the arguments
    of both.
    """

    strategy_name = "balanced_ddp_model_parallel"
