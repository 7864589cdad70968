"""Register the strategies by name, and answer what loops and callbacks ask of any strategy, of this project or not."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from pytorch_lightning.strategies import ParallelStrategy, Strategy, StrategyRegistry

from .batch.layout import Layout
from .batch.one_process import OneProcessStrategy
from .core.loop_contract import NothingToDo, StepContract
from .ddp import BalancedDDPModelParallelStrategy, BalancedDDPStrategy, DDPModelParallelStrategy, DDPStrategy
from .distributed.script_launcher import StartMethod
from .dp import BalancedDataParallelStrategy, DataParallelStrategy
from .fsdp import FSDPStrategy
from .model_parallel import ModelParallelStrategy
from .ranks.strategy import RankStrategy
from .single_device import SingleDeviceStrategy

_CLASSES: list[Any] = [
    SingleDeviceStrategy, DataParallelStrategy, BalancedDataParallelStrategy, ModelParallelStrategy, DDPStrategy,
    BalancedDDPStrategy, DDPModelParallelStrategy, BalancedDDPModelParallelStrategy, FSDPStrategy,
]  # fmt: skip
STRATEGIES: dict[str, type[Strategy]] = {cls.strategy_name: cls for cls in _CLASSES}
"""Strategies of this project by the name that `strategy=` takes."""

_STARTS: Mapping[str, StartMethod | None] = {"": None, "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_UNUSED: dict[str, dict[str, Any]] = {
    "": {},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
}
LIGHTNINGS_WORDS: Mapping[str, Callable[[], Strategy]] = {
    f"ddp{start}{unused}": partial(DDPStrategy, start_method=method, **options)
    for start, method in _STARTS.items()
    for unused, options in _UNUSED.items()
} | {"fsdp_cpu_offload": partial(FSDPStrategy, cpu_offload=True)}
"""What makes the strategies of this project for words of Lightning's that stand for a strategy with options."""


for _name, _cls in STRATEGIES.items():
    if _name not in StrategyRegistry:  # a name that Lightning does not have: a stock pl.Trainer takes it too
        StrategyRegistry.register(_name, _cls, description=_cls.__name__)

_OURS = (OneProcessStrategy, RankStrategy)


def name_of(strategy: Strategy) -> str:
    """The name that `strategy=` takes, or the class's."""
    return getattr(strategy, "strategy_name", type(strategy).__name__)


def contract_of(strategy: Strategy) -> StepContract:
    """What the strategy does beside Lightning's part; one that is not of this project adds nothing."""
    return strategy.contract if isinstance(strategy, _OURS) else NothingToDo()


def ranks_of(strategy: Strategy) -> RankStrategy | None:
    """The strategy as one whose ranks share batches, exchange values and stop together; None for any other."""
    return strategy if isinstance(strategy, RankStrategy) else None


def processes_of(strategy: Strategy) -> int:
    """Count the processes that train together, whatever a run sees of them."""
    return strategy.num_together if isinstance(strategy, RankStrategy) else getattr(strategy, "world_size", 1)


def layout_of(strategy: Strategy) -> Layout | None:
    """How the strategy uses the devices of this process; None if that is not known."""
    return strategy.layout if isinstance(strategy, _OURS) else None


def process_devices(strategy: Strategy) -> list[torch.device]:
    """The devices of this process, the root device first."""
    return strategy.process_devices if isinstance(strategy, _OURS) else [strategy.root_device]


def devices_in_use(strategy: Strategy) -> list[torch.device]:
    """The devices of this process and of its parameters, the root device first."""
    root, module = strategy.root_device, strategy.lightning_module
    of_parameters = () if module is None else (parameter.device for parameter in module.parameters())
    return list(dict.fromkeys([root, *of_parameters, *process_devices(strategy)]))


def node_devices(strategy: Strategy) -> list[torch.device]:
    """The devices of all processes of this machine."""
    given = strategy.parallel_devices if isinstance(strategy, ParallelStrategy) else None
    return given or process_devices(strategy)


def num_processes(strategy: type[Strategy], num_devices: int, options: dict[str, Any]) -> int | None:
    """Count the processes of a machine that a strategy starts for its devices, by its options; None for one process."""
    if issubclass(strategy, RankStrategy):
        return strategy.count_processes(num_devices, **options)
    return num_devices if issubclass(strategy, ParallelStrategy) else None


def stop_signal_of(strategy: Strategy) -> int | None:
    """The signal by which all ranks have agreed to stop, if any."""
    return strategy.group.stop_signal if isinstance(strategy, RankStrategy) else None
