"""Log training speed, and collect the figures of the summary table."""

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn
from typing_extensions import override

from ...strategies.batch.structure import num_samples
from ...strategies.core.internals import callbacks_of
from ...strategies.core.module_checks import has_nan
from ...strategies.registry import process_devices, ranks_of
from .device_monitor import gather_peak_memory_mib, reset_peaks
from .step_times import DDPTimes, StepClock, StepTimes


class RunSummary(pl.Callback):
    """Count training samples and training seconds, without validation: the one clock of a run, which others read.

    At every log point the loggers get means per optimizer step since the last one: `speed/samples_per_s` over all
    processes, and `speed/step_ms`, `speed/compute_ms`, `speed/data_wait_ms` (and, under DDP, `speed/communication_ms`)
    of rank 0. Each step only reads the host's clock twice, without device synchronization or communication.

    After `fit`, `samples_per_s`, `global_batch` (samples) and `peak_memory_mib` (per device) hold the figures over all
    processes, and `diverged` tells whether the weights contain nan.
    """

    def __init__(self) -> None:
        self.samples_per_s: float | None = None
        self.global_batch: int | None = None
        self.peak_memory_mib: list[float] = []
        self.diverged = False
        self.clock = StepClock()
        """Of the steps; other callbacks may tell it of their phases."""
        self.figures: dict[type, Callable[[StepTimes], dict[str, float]]] = {}
        """What other callbacks, by class, make of the means at a log point; it is logged with them."""
        self._own_samples = 0
        self._first_batch = 0
        self._last_step = 0
        self._ddp_times: DDPTimes | None = None

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "RunSummary | None":
        """The trainer's; None if it has none."""
        return next((callback for callback in callbacks_of(trainer) if isinstance(callback, cls)), None)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        reset_peaks(process_devices(trainer.strategy))
        self.clock.measure_on(trainer.strategy.root_device)
        self._last_step = trainer.fit_loop.epoch_loop._batches_that_stepped
        self._ddp_times = DDPTimes.of(trainer)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.clock.go()

    @override
    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.clock.enter("forward")

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.clock.enter(None)
        ranks = ranks_of(trainer.strategy)
        share = None if ranks is None else ranks.contract.shares.current
        # if the strategy does not define the samples of all processes, each is assumed to have as many
        own, total = (int(share.num), int(share.total)) if share else (num_samples(batch) or 0, None)
        self.clock.num_samples += own * trainer.world_size if total is None else total
        self._own_samples += own
        self._first_batch = self._first_batch or own
        step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        interval: int = getattr(trainer, "log_every_n_steps")  # noqa: B009  # Lightning sets it undeclared
        if interval and step % interval == 0 and step != self._last_step and trainer.loggers:
            self._log(trainer, step)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.clock.pause()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.clock.go()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        clock, strategy = self.clock, trainer.strategy
        clock.pause()
        # collectives, after the last step
        counts = torch.tensor([self._own_samples, self._first_batch], device=strategy.root_device)
        samples, batch = strategy.reduce(counts, reduce_op="sum").tolist()
        self.global_batch = batch or None
        self.samples_per_s = samples / clock.seconds if samples and clock.seconds else None
        self.peak_memory_mib = gather_peak_memory_mib(strategy)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # also of a run that was resumed after its end, and takes no step
        self.diverged = trainer.strategy.reduce_boolean_decision(has_nan(pl_module), all=False)

    def _log(self, trainer: pl.Trainer, step: int) -> None:
        """Log the means since the last log point; with accumulation, at the first batch of the step."""
        wait_s: float = getattr(trainer.fit_loop.epoch_loop, "data_wait_s", 0.0)
        times = self.clock.read(step - self._last_step, wait_s)
        self._last_step = step
        if times is None:
            return
        values = {f"speed/{name}": getattr(times, name) for name in ("samples_per_s", "step_ms", "compute_ms")}
        if wait_s:  # not measured in Lightning's own loop, which runs with a profiler or `dataloader_iter`
            values["speed/data_wait_ms"] = times.data_wait_ms
        if self._ddp_times is not None and (exposed := self._ddp_times.exposed_communication_ms()) is not None:
            values["speed/communication_ms"] = exposed
        for figures in self.figures.values():
            values |= figures(times)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step - 1)
