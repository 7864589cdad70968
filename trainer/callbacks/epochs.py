"""Show a line for each epoch, which stays above the progress bar; log at least once per epoch."""

import logging
import math
import time
from contextlib import ExitStack

import pytorch_lightning as pl
from pytorch_lightning.callbacks import RichProgressBar
from typing_extensions import override

from ...strategies.core.patching import LIGHTNING_TELLS, filtered

log = logging.getLogger(__name__)


class EpochLines(pl.Callback):
    """Log a line after every epoch: its seconds, the steps so far, and the progress bar's metrics.

    Epochs count from 0, as in the progress bar, the names of checkpoints and the metric `epoch`.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._ended: tuple[int, float] | None = None
        self._told_first = ExitStack()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = time.perf_counter()  # of an epoch that was begun before the run was interrupted

        def tell_first(record: logging.LogRecord) -> bool:
            if "`Trainer.fit` stopped" in record.getMessage():  # what Lightning says before `on_train_end`
                self._tell(trainer)
                bar = trainer.progress_bar_callback
                if isinstance(bar, RichProgressBar) and bar.progress is not None:
                    bar.progress.stop()  # its last line stays above that
            return True

        self._told_first.enter_context(filtered(LIGHTNING_TELLS, tell_first))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._told_first.close()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._tell(trainer)
        self._since = time.perf_counter()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning computes the epoch's means after this hook
        self._ended = (trainer.current_epoch, time.perf_counter() - self._since)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._tell(trainer)

    def _tell(self, trainer: pl.Trainer) -> None:
        if self._ended is None:
            return
        epoch, seconds = self._ended
        self._ended = None
        metrics = trainer.progress_bar_metrics or {
            name: value.item() for name, value in trainer.callback_metrics.items() if value.numel() == 1
        }
        shown = [f"{name} {value:.4g}" for name, value in metrics.items()]
        of = f"/{trainer.max_epochs - 1}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        log.info(" · ".join([f"epoch {epoch}{of}", f"step {trainer.global_step}", f"{seconds:.1f} s", *shown]))


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
