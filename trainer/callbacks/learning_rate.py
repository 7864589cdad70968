"""Log the learning rate of every optimizer."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import LearningRateMonitor
from typing_extensions import override


class LearningRate(LearningRateMonitor):
    """Lightning's `LearningRateMonitor`, except that it does nothing, instead of raising, without a logger.

    `logging_interval` is `step` or `epoch`; the other arguments are Lightning's, too.
    """

    @override
    def on_train_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.loggers:
            super().on_train_start(trainer, *args, **kwargs)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.loggers:
            super().on_train_batch_start(trainer, *args, **kwargs)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.loggers:
            super().on_train_epoch_start(trainer, *args, **kwargs)
