"""Names of strategies: the one word of configuration."""

from pytorch_lightning.strategies import Strategy, StrategyRegistry

from .balanced_dp import BalancedDataParallelStrategy
from .ddp import DDPStrategy
from .dp import DataParallelStrategy
from .single_device import SingleDeviceStrategy

STRATEGIES: dict[str, type[Strategy]] = {
    cls.strategy_name: cls
    for cls in (SingleDeviceStrategy, DataParallelStrategy, BalancedDataParallelStrategy, DDPStrategy)
}
"""The strategies of this project, by the word that `strategy=` takes."""

for _cls in (DataParallelStrategy, BalancedDataParallelStrategy):
    # words that Lightning does not have: a stock pl.Trainer takes them, too
    StrategyRegistry.register(_cls.strategy_name, _cls, description=_cls.__name__, override=True)
