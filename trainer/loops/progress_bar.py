"""Refresh the default progress bar at a time interval instead of every few steps."""

import time
from functools import partialmethod
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar

REFRESH_S = 0.1
"""Seconds between two refreshes. A refresh costs as much as several tiny training steps."""


class TimedBar:
    """Replaces a progress bar in a loop's `*_batch_end` hooks.

    The last batch is always shown. Batch and outputs are not kept: Lightning's bars read neither.
    """

    def __init__(self, bar: ProgressBar) -> None:
        self.bar = bar
        self._due_s = 0.0
        self._behind: int | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Refresh if the interval is over or this is the epoch's last batch."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        last = progress.is_last_batch or progress.current.ready >= trainer.num_training_batches
        if last or time.perf_counter() >= self._due_s:
            self._behind = None
            self.bar.on_train_batch_end(trainer, module, outputs, batch, batch_idx)
            self._due_s = time.perf_counter() + REFRESH_S
        else:
            self._behind = batch_idx

    def catch_up(self, trainer: pl.Trainer) -> None:
        """Show the steps not shown yet, before something else is printed."""
        if self._behind is not None:
            batch_idx, self._behind = self._behind, None
            self.bar.on_train_batch_end(trainer, trainer.lightning_module, None, None, batch_idx)

    def _evaluation(self, hook: str, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        """Refresh if the interval is over."""
        batch_idx, dataloader_idx = args[2], args[3] if len(args) > 3 else 0
        loop = trainer._active_loop
        sizes: Any = getattr(loop, "max_batches", None)
        last = not sizes or batch_idx + 1 >= sizes[dataloader_idx]
        if last or time.perf_counter() >= self._due_s:
            getattr(self.bar, hook)(trainer, module, *args)
            self._due_s = time.perf_counter() + REFRESH_S

    on_validation_batch_end = partialmethod(_evaluation, "on_validation_batch_end")
    on_test_batch_end = partialmethod(_evaluation, "on_test_batch_end")
    on_predict_batch_end = partialmethod(_evaluation, "on_predict_batch_end")
