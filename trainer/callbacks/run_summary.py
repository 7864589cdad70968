"""What the closing table says of the training: samples per second and the global batch."""

import time
from typing import Any

import pytorch_lightning as pl
import torch
from typing_extensions import override

from ...strategies.chunks import num_samples


class RunSummary(pl.Callback):
    """Count training samples, and the seconds spent on them (validation excluded).

    After `fit`, `samples_per_s` and `global_batch` (samples) hold the figures over all processes; before, None.
    """

    def __init__(self) -> None:
        self.samples_per_s: float | None = None
        self.global_batch: int | None = None
        self._num_samples = 0
        self._first_batch = 0
        self._seconds = 0.0
        self._since: float | None = None

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = self._since or time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        count = num_samples(batch) or 0
        self._first_batch = self._first_batch or count
        self._num_samples += count

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_clock()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.training or trainer.validating:
            self._since = time.perf_counter()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_clock()
        # the one collective of this callback, after the last step
        counts = torch.tensor([self._num_samples, self._first_batch], device=trainer.strategy.root_device)
        samples, batch = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
        self.global_batch = batch or None
        self.samples_per_s = samples / self._seconds if samples and self._seconds else None

    def _stop_clock(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
        self._since = None
