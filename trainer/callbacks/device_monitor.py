"""Log each device's share of the batch, its time and its memory, and name a rank that is slower than the others.

The memory of the CPU is the process's resident size.
"""

import logging
from collections.abc import Sequence
from statistics import quantiles
from typing import Any, NamedTuple

import pytorch_lightning as pl
from typing_extensions import override

from ...strategies.distributed.objects import gather_objects
from ...strategies.registry import name_of, ranks_of
from .start_up import global_sizes
from .step_times import SAMPLES_PER_POINT, DDPTimes, gather_peak_memory_mib


class DeviceMonitor(pl.Callback):
    """Log memory, batch share and time of every device of every process after each training epoch.

    Devices are numbered over all processes (`partition` in TensorBoard's TEXT tab lists them).

    - `device/peak_memory_mib_<i>`: on accelerators the memory of tensors (`torch.cuda.max_memory_allocated`), on the
      CPU the process's largest resident size, the same for all devices of a process.
    - `balance/share_<i>`: the device's fraction of a full batch, if batches are cut among devices. Strategies that
      measure devices log these during training, with `balance/time_s_<i>` and `balance/efficiency`.
    """

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        memory = gather_peak_memory_mib(trainer.strategy)
        values = {f"device/peak_memory_mib_{i}": value for i, value in enumerate(memory)}
        sizes, _ = global_sizes(trainer)  # empty, or one, if the batch is not cut
        if len(sizes) > 1 and not any(name.startswith("balance/") for name in trainer.logged_metrics):
            values |= {f"balance/share_{i}": size / sum(sizes) for i, size in enumerate(sizes)}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=max(0, trainer.fit_loop.epoch_loop._batches_that_stepped - 1))


log = logging.getLogger(__name__)

SLOWER = 1.15
"""Ratio of the slowest rank's lower quartile to every other rank's upper one from which it counts as slower."""


class Spread(NamedTuple):
    """Quartiles of a rank's own seconds per step, without waits, since the last log point."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """The quartiles of at least two values."""
        return cls(*quantiles(seconds, method="inclusive"))


def slow_rank(ranks: Sequence[Spread]) -> int | None:
    """Find the rank that is clearly slower than every other; None if there is none."""
    slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].low)
    highest = max(spread.high for rank, spread in enumerate(ranks) if rank != slowest)
    return slowest if ranks[slowest].low > SLOWER * highest else None


class SlowRank(pl.Callback):
    """Warn once, under plain `ddp`, if a rank is slower than all others at two log points in succession.

    The times are those that torch's DDP samples; ranks exchange their quartiles at log points.
    """

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._own: list[float] = []
        self._slow: int | None = None
        self._num_batches = self._last_step = 0
        ranks = ranks_of(trainer.strategy)
        is_ddp = ranks is not None and trainer.world_size > 1 and name_of(ranks) == "ddp"
        self._times = DDPTimes.of(trainer) if is_ddp else None

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._times is None:
            return
        self._num_batches += 1
        if self._num_batches % self._times.every == 0 and (seconds := self._times.own_compute_s()) is not None:
            self._own.append(seconds)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        interval: int = getattr(trainer, "log_every_n_steps")  # noqa: B009  # Lightning sets it undeclared
        if step % interval == 0 and step != self._last_step:
            own, self._own, self._last_step = self._own[-SAMPLES_PER_POINT:], [], step
            self._judge(gather_objects(Spread.of(own) if len(own) > 1 else None), trainer.is_global_zero)

    def _judge(self, spreads: Sequence[Spread | None], is_first: bool) -> None:
        known = [spread for spread in spreads if spread is not None]
        before, self._slow = self._slow, slow_rank(known) if len(known) == len(spreads) else None
        if self._slow is None or self._slow != before:
            return
        self._times = None
        if is_first:
            others = max(spread.middle for rank, spread in enumerate(known) if rank != self._slow)
            log.warning(
                "Rank %d takes %.3g ms for its own part of a step, the others at most %.3g ms, and all wait for it. "
                "strategy=balanced_ddp gives each rank the share of the global batch that it is fast enough for.",
                self._slow, 1000 * known[self._slow].middle, 1000 * others,
            )  # fmt: skip
