"""DDP among blocks of devices of unequal speed: each block takes its share of every global batch."""

from .balanced_ddp import BalancedDDPStrategy
from .ddp_model_parallel import PipelineInRanks


class BalancedDDPModelParallelStrategy(PipelineInRanks, BalancedDDPStrategy):
    """`DDPModelParallelStrategy` whose ranks share each global batch by fixed or measured weights.

    What ranks do is `BalancedDDPStrategy`'s, what the devices of a block do is `ModelParallelStrategy`'s; the arguments
    are those of both.
    """

    strategy_name = "balanced_ddp_model_parallel"
