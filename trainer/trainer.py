"""The trainer: Lightning's, with strategies of this project chosen by object or by one word."""

from typing import Any

import pytorch_lightning as pl
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.strategies import Strategy

from ..strategies import STRATEGIES
from ..strategies.devices import are_names, give_devices
from .checkpoint_io import VerifiedCheckpointIO
from .resume import ResumingEpochLoop, ResumingFitLoop


class Trainer(pl.Trainer):
    """`pytorch_lightning.Trainer` that also takes this project's strategies.

    Args:
        strategy: a strategy object, or a name: those of `evener.strategies.STRATEGIES`, or any of Lightning's.
        **kwargs: every argument of `pytorch_lightning.Trainer`, with the same meaning and the same default; `devices`
            may also list names (`["cuda:0", "cpu"]`) for a strategy of one process.
    """

    def __init__(self, *, strategy: str | Strategy = "auto", **kwargs: Any) -> None:
        if isinstance(strategy, str) and strategy in STRATEGIES:
            strategy = STRATEGIES[strategy]()
        if are_names(kwargs.get("devices")):
            kwargs |= give_devices(strategy, kwargs["devices"])
        super().__init__(strategy=strategy, **kwargs)
        self._make_resumable()

    def _make_resumable(self) -> None:
        """Put loops that save and resume exactly in the place of Lightning's, and files that are verified."""
        lightnings = self.fit_loop
        self.fit_loop = ResumingFitLoop(self, lightnings.min_epochs, lightnings.max_epochs)
        self.fit_loop.epoch_loop = ResumingEpochLoop(self, lightnings.min_steps, lightnings.max_steps)
        if type(self.strategy.checkpoint_io) is TorchCheckpointIO:
            self.strategy.checkpoint_io = VerifiedCheckpointIO()
