"""Several devices in one DDP process: the process's batch is cut among replicas, whose gradients are summed first."""

from collections.abc import Callable, Sequence

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import Precision
from typing_extensions import override

from .dp import DataParallelStrategy


class RankReplicas(DataParallelStrategy):
    """`DataParallelStrategy` for the devices of one rank, used by `DDPStrategy` in place of its own step.

    Args:
        devices: of this rank, its root device first.
        precision_plugin: the rank's.
        reduce: averages the root's gradients over all ranks; called when the replicas' gradients are summed.
    """

    strategy_name = "ddp"
    _without_replicas = "strategy.devices_per_process=1"

    def __init__(
        self, devices: Sequence[torch.device], precision_plugin: Precision, reduce: Callable[[], None]
    ) -> None:
        super().__init__(devices=devices)
        self.precision_plugin = precision_plugin
        self._reduce_gradients = reduce

    def attach(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Make the replicas of a module that is on the root device."""
        self._lightning_module = module
        self._verify(trainer, module)
        self.replicate(module)

    @override
    def finish_backward(self) -> None:
        super().finish_backward()
        self._reduce_gradients()

    def weights_changed(self) -> None:
        """Have the next step copy the root's parameters: the optimizer, or a callback, has written to them."""
        self._mark_changed()
