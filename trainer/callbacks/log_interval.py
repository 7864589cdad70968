"""Log at least one point per epoch."""

import math

import pytorch_lightning as pl
from typing_extensions import override


class LogEveryEpoch(pl.Callback):
    """Shorten `log_every_n_steps` to the number of optimizer steps in an epoch, if an epoch has fewer.

    Lightning logs nothing if training is shorter than the interval, and the curves stay empty.
    """

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        batches = trainer.num_training_batches
        if math.isfinite(batches) and batches > 0:
            steps = math.ceil(batches / trainer.accumulate_grad_batches)
            interval: int = getattr(trainer, "log_every_n_steps")  # noqa: B009  # Lightning sets it undeclared
            setattr(trainer, "log_every_n_steps", min(interval, steps))  # noqa: B010
