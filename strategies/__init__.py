"""Spread training over devices and processes: the strategies and their building blocks."""

from .core.lightning_names import unify, verify_version

unify()  # before anything imports Lightning
verify_version()  # before anything derives from its classes


from .core.errors import ConfigError
from .ddp import BalancedDDPModelParallelStrategy, BalancedDDPStrategy, DDPModelParallelStrategy, DDPStrategy
from .dp import BalancedDataParallelStrategy, DataParallelStrategy
from .fsdp import FSDPStrategy
from .model_parallel import ModelParallelStrategy
from .registry import STRATEGIES
from .single_device import SingleDeviceStrategy

__all__ = [
    "STRATEGIES",
    "BalancedDDPModelParallelStrategy",
    "BalancedDDPStrategy",
    "BalancedDataParallelStrategy",
    "ConfigError",
    "DDPModelParallelStrategy",
    "DDPStrategy",
    "DataParallelStrategy",
    "FSDPStrategy",
    "ModelParallelStrategy",
    "SingleDeviceStrategy",
]
