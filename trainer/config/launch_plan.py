"""Say what a configured strategy needs on each node: its class, devices and processes."""

from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from pytorch_lightning.strategies import Strategy

from ...strategies.core.device_names import resolve_devices
from ...strategies.registry import num_processes
from .checks import plain, verify_target


@dataclass(frozen=True)
class LaunchPlan:
    """How a job is spread over processes.

    Args:
        devices: the devices of a node, in order.
        num_processes: processes of a node; None for strategies of one process.
    """

    devices: tuple[torch.device, ...]
    num_processes: int | None

    @classmethod
    def of(cls, cfg: DictConfig) -> "LaunchPlan":
        """Read the plan from a configuration.

        Raises:
            ConfigError: the devices do not exist here, or don't divide into processes.
        """
        strategy = verify_target("strategy", cfg.strategy, Strategy)
        devices = resolve_devices(plain(cfg.devices), cfg.accelerator)
        options = {key: value for key, value in plain(cfg.strategy).items() if key != "_target_"}
        return cls(tuple(devices), num_processes(strategy, len(devices), options))


def strategy_name(cfg: DictConfig) -> str:
    """The name of the configured strategy: the one that `strategy=` takes, or its class's."""
    cls = verify_target("strategy", cfg.strategy, Strategy)
    return getattr(cls, "strategy_name", cls.__name__)
