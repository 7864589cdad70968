"""Register the strategies by name."""

from pytorch_lightning.strategies import Strategy, StrategyRegistry

from .balanced_ddp import BalancedDDPStrategy
from .balanced_ddp_model_parallel import BalancedDDPModelParallelStrategy
from .balanced_dp import BalancedDataParallelStrategy
from .ddp import DDPStrategy
from .ddp_model_parallel import DDPModelParallelStrategy
from .dp import DataParallelStrategy
from .fsdp import FSDPStrategy
from .model_parallel import ModelParallelStrategy
from .single_device import SingleDeviceStrategy

STRATEGIES: dict[str, type[Strategy]] = {
    cls.strategy_name: cls
    for cls in (
        SingleDeviceStrategy,
        DataParallelStrategy,
        BalancedDataParallelStrategy,
        ModelParallelStrategy,
        DDPStrategy,
        BalancedDDPStrategy,
        DDPModelParallelStrategy,
        BalancedDDPModelParallelStrategy,
        FSDPStrategy,
    )
}
"""Strategies of this project by the name that `strategy=` takes."""


for _name, _cls in STRATEGIES.items():
    if _name not in StrategyRegistry:  # a name that Lightning does not have: a stock pl.Trainer takes it too
        StrategyRegistry.register(_name, _cls, description=_cls.__name__)
