"""Names of strategies: the one word of configuration."""

from pytorch_lightning.strategies import Strategy

from .ddp import DDPStrategy
from .single_device import SingleDeviceStrategy

STRATEGIES: dict[str, type[Strategy]] = {cls.strategy_name: cls for cls in (SingleDeviceStrategy, DDPStrategy)}
"""The strategies of this project, by the word that `strategy=` takes."""
