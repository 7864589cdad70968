"""Measure time intervals that end on all ranks at the same batch, although their clocks differ; one is `max_time`."""

import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Timer
from typing_extensions import override

from ...strategies.registry import processes_of


class Interval:
    """A time interval by rank 0's clock, broadcast after half of the batches that the rest is estimated to take."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.start()

    def start(self) -> None:
        """Restart the interval."""
        self._since, self._num_batches, self._ask_at = time.monotonic(), 0, 1

    def is_over(self, trainer: pl.Trainer) -> bool:
        """Count a batch; if the interval is over, restart it. All ranks get the same answer."""
        self._num_batches += 1
        if processes_of(trainer.strategy) > 1 and self._num_batches < self._ask_at:
            return False
        elapsed_s = trainer.strategy.broadcast(time.monotonic() - self._since)
        if elapsed_s >= self.seconds:
            self.start()
            return True
        rest = (self.seconds - elapsed_s) / max(elapsed_s, 1e-9) * self._num_batches
        self._ask_at = self._num_batches + max(1, int(min(rest / 2, 1e9)))
        return False


class RunTimer(Timer):
    """Lightning's timer of `max_time`, which counts the time of this run alone, and asks rank 0 at a few batches.

    Lightning's adds that of the runs before: one that was stopped by it and goes on with the same `max_time` would stop
    again at once.
    """

    def __init__(self, timer: Timer) -> None:
        super().__init__()
        self._duration = timer._duration
        self._rest = Interval(self._duration or 0.0)

    @property
    @override
    def state_key(self) -> str:
        return Timer.__qualname__

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the state is the time of earlier runs."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._rest.start()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if not trainer.should_stop and self._rest.is_over(trainer):
            self._check_time_remaining(trainer)
