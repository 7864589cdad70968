"""Measure a time interval that ends on all ranks at the same batch, although their clocks differ."""

import time

import pytorch_lightning as pl


class Interval:
    """A time interval by rank 0's clock, which is broadcast only at a few batches per interval.

    After each broadcast, the next one follows after half of the batches that the rest of the interval is estimated to
    take: a handful of broadcasts per interval, and little overshoot.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.start()

    def start(self) -> None:
        """Restart the interval."""
        self._since = time.monotonic()
        self._num_batches = 0
        self._ask_at = 1

    def is_over(self, trainer: pl.Trainer) -> bool:
        """Count a batch; if the interval is over, restart it.

        Returns:
            The same answer on all ranks.
        """
        self._num_batches += 1
        if trainer.world_size > 1 and self._num_batches < self._ask_at:
            return False
        elapsed_s = time.monotonic() - self._since
        if trainer.world_size > 1:
            elapsed_s = trainer.strategy.broadcast(elapsed_s)
        if elapsed_s >= self.seconds:
            self.start()
            return True
        rest = (self.seconds - elapsed_s) / max(elapsed_s, 1e-9) * self._num_batches
        self._ask_at = self._num_batches + max(1, int(min(rest / 2, 1e9)))
        return False
