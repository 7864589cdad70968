"""How the work is spread: strategies and the pieces they are made of."""

from .ddp import DDPStrategy
from .dp import DataParallelStrategy
from .exceptions import ConfigError
from .registry import STRATEGIES
from .single_device import SingleDeviceStrategy

__all__ = ["STRATEGIES", "ConfigError", "DDPStrategy", "DataParallelStrategy", "SingleDeviceStrategy"]
