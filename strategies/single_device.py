"""Train on one device in one process: the reference that every other strategy must equal."""

from collections.abc import Sequence

import pytorch_lightning as pl
import pytorch_lightning.strategies as pl_strategies
import torch
from typing_extensions import override

from .batch.over_batch import verify_no_step_end
from .core.errors import ConfigError
from .core.options import checked
from .core.types import Device
from .pipeline.recompute import Recompute, RecomputeOption


class SingleDeviceStrategy(pl_strategies.SingleDeviceStrategy):
    """Train on one device in one process.

    Args:
        device: where to train. None takes the trainer's one device (`accelerator=`, `devices=1`).
        recompute: parts of the module whose activations are computed once more in the backward pass: `never`,
            `always`, `except_last`, or names of submodules.

    Raises:
        ConfigError: the trainer was given more than one device.
    """

    strategy_name = "single_device"

    @checked
    def __init__(self, device: Device | None = None, recompute: RecomputeOption = "never") -> None:
        super().__init__(device="cpu" if device is None else torch.device(device))
        self._given = device is not None
        self.recompute = Recompute(recompute, self.strategy_name)

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device as a list of one; empty until the trainer has chosen it."""
        return [self.root_device] if self._given else []

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        if len(devices) != 1:
            raise ConfigError(
                f"single_device: {len(devices)} devices were given, but it uses exactly one. "
                "Set devices=1, or choose a strategy that spreads the work, such as strategy=ddp."
            )
        self._root_device, self._given = devices[0], True

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        verify_no_step_end(trainer.lightning_module)
        self.recompute.begin(trainer)
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        self.recompute.end()
        super().teardown()
