"""Log histograms of weights and gradients to TensorBoard."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import TensorBoardLogger
from typing_extensions import override

from ...strategies.core.options import Count, checked
from ...strategies.sharding.whole import gather_tree


class Histograms(pl.Callback):
    """Log histograms `weights/<parameter>` and `gradients/<parameter>` to TensorBoard after an epoch's last batch.

    The gradients are those of the epoch's last step, as the optimizer got them: summed over replicas, averaged over
    ranks, clipped. A parameter that has none, or has had it set to None, has no histogram of gradients. Every value is
    read on the host, so this costs time with each epoch; other loggers get nothing.

    Args:
        every_n_epochs: number of epochs between histograms.
    """

    @checked
    def __init__(self, every_n_epochs: Count = 1) -> None:
        self.every_n_epochs = every_n_epochs

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Log the histograms after the last batch: validation, which follows, sets the gradients to None."""
        if not trainer.is_last_batch or (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        writers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not writers:
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for name, parameter in pl_module.named_parameters():
            for kind, values in (("weights", parameter), ("gradients", parameter.grad)):
                if values is None:
                    continue
                whole = gather_tree(values.detach(), keep=trainer.is_global_zero)  # of shards, which all ranks must ask
                for writer in writers if trainer.is_global_zero else ():
                    writer.experiment.add_histogram(f"{kind}/{name}", whole.float().cpu(), step)
