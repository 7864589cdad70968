"""Measure the time of training steps and its parts, by the host's clock and events of devices, and peaks of memory."""

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.trainer.states import TrainerFn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from ...strategies.batch.structure import num_samples
from ...strategies.core.devices import (
    has_streams,
    is_accelerator,
    peak_memory_bytes,
    precise_dtype,
    seconds_between,
    time_mark,
)
from ...strategies.core.module_checks import callbacks_of, has_nan
from ...strategies.registry import process_devices, ranks_of
from .start_up import global_sizes

NS_PER_MS = 1e6
MIB = 2**20

PHASES: Sequence[str] = ("forward", "backward", "optimizer")

Mark: TypeAlias = float | torch.Event
"""A point in time, by the host's clock or on a device."""

SAMPLES_PER_POINT = 10
"""Steps between two log points whose times torch's DDP records."""


def exposed_communication_ms(model: DistributedDataParallel) -> dict[str, float]:
    """Milliseconds of gradient communication beside backward, with waits for other ranks, in the last sampled step.

    Empty until torch has sampled one, and where the module was taken out of this wrapper.

    Source: `torch/nn/parallel/distributed.py` (torch 2.13), `_get_ddp_logging_data`.
    """
    data: Any = {} if model.logger is None else model._get_ddp_logging_data()
    total, overlap = data.get("backward_comm_time"), data.get("backward_compute_comm_overlap_time")
    if total is None or overlap is None:
        return {}
    return {"speed/communication_ms": max(0.0, (int(total) - int(overlap)) / NS_PER_MS)}


class StepClock:
    """Adds up the seconds of training, and of the phases of its steps, until they are read.

    Args:
        now: reads a monotonic clock, in seconds.

    Attributes:
        num_samples: samples so far.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.num_samples = 0
        self._now, self._mark = now, now
        self._since: float | None = None
        self._trained_s = 0.0
        self._phases_s = dict.fromkeys(PHASES, 0.0)
        self._phase: tuple[str, Mark] | None = None
        self._queued: deque[tuple[str, Mark, Mark]] = deque()
        self._last = [0.0] * (3 + len(PHASES))

    def measure_on(self, device: torch.device) -> None:
        """Measure from now on what a device computes, by events; nothing waits for it until they are read."""
        self._mark = partial(time_mark, device) if is_accelerator(device) else self._now
        self._phase = None

    @property
    def seconds(self) -> float:
        """Seconds of training so far, pauses excluded."""
        return self._trained_s + (0.0 if self._since is None else self._now() - self._since)

    def go(self) -> None:
        """Start, or resume after a pause."""
        if self._since is None:
            self._since = self._now()

    def pause(self) -> None:
        """Pause, for anything that is not training."""
        self._trained_s, self._since = self.seconds, None

    def enter(self, phase: str | None) -> None:
        """Begin a phase of a step, after what is queued now; this ends the one before, and None only ends that."""
        mark = self._mark()
        if self._phase is not None:
            self._queued.append((*self._phase, mark))
        self._phase = None if phase is None else (phase, mark)
        while self._queued and (not isinstance(end := self._queued[0][2], torch.Event) or end.query()):
            self._add_oldest()

    def _add_oldest(self) -> None:
        phase, start, end = self._queued.popleft()
        self._phases_s[phase] += seconds_between(start, end)

    def read(self, num_steps: int, data_wait_s: float = 0.0) -> dict[str, float]:
        """Read the means since the last reading, between two steps; waits for the device.

        Args:
            num_steps: optimizer steps since then.
            data_wait_s: seconds of waiting for the loader since the start of training.

        Returns:
            By name: `samples_per_s`; and in milliseconds `step_ms` from step to step, validation excluded, `compute_ms`
            from a batch's arrival on the device to the end of its step there, its parts `forward_ms`, `backward_ms` and
            `optimizer_ms` (all is forward if nobody has told the clock of others), and `data_wait_ms`. Empty if no time
            has passed.
        """
        while self._queued:
            self._add_oldest()
        now = [self.seconds, data_wait_s, self.num_samples, *self._phases_s.values()]
        seconds, wait, samples, *phases = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        if seconds <= 0 or num_steps < 1:
            return {}
        sums = {"step": seconds, "compute": sum(phases), "data_wait": wait, **dict(zip(PHASES, phases, strict=True))}
        return {"samples_per_s": samples / seconds, **{f"{key}_ms": 1000 * sums[key] / num_steps for key in sums}}


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
        self.figures: dict[type, Callable[[dict[str, float]], dict[str, float]]] = {}
        """What other callbacks, by class, make of the means at a log point; it is logged with them."""
        self._last_step = 0

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "RunSummary | None":
        """The trainer's; None if it has none."""
        return next((callback for callback in callbacks_of(trainer) if isinstance(callback, cls)), None)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        reset_peaks(process_devices(trainer.strategy))
        self.clock.measure_on(trainer.strategy.root_device)
        self._last_step = trainer.fit_loop.epoch_loop._batches_that_stepped
        model, every = trainer.strategy.model, self._log_every(trainer) * trainer.accumulate_grad_batches
        if isinstance(model, DistributedDataParallel) and every:
            model._set_ddp_runtime_logging_sample_rate(max(1, every // SAMPLES_PER_POINT))

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
        total = int(share.total) if share else (num_samples(batch) or 0) * trainer.world_size
        self.clock.num_samples += total
        self.global_batch = self.global_batch or total or None
        step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        interval = self._log_every(trainer)
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
        clock = self.clock
        clock.pause()
        self.samples_per_s = clock.num_samples / clock.seconds if clock.num_samples and clock.seconds else None
        self.peak_memory_mib = gather_peak_memory_mib(trainer.strategy)  # a collective, after the last step

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # also of a run that was resumed after its end, and takes no step
        self.diverged = trainer.strategy.reduce_boolean_decision(has_nan(pl_module), all=False)

    @staticmethod
    def _log_every(trainer: Any) -> int:
        return trainer.log_every_n_steps or 0

    def _log(self, trainer: pl.Trainer, step: int) -> None:
        """Log the means since the last log point; with accumulation, at the first batch of the step."""
        wait_s: float = getattr(trainer.fit_loop.epoch_loop, "data_wait_s", 0.0)
        times = self.clock.read(step - self._last_step, wait_s)
        self._last_step = step
        if not times:
            return
        shown = ("samples_per_s", "step_ms", "compute_ms", *(["data_wait_ms"] if wait_s else []))
        values = {f"speed/{name}": times[name] for name in shown}  # Lightning's own loop measures no waits
        if isinstance(model := trainer.strategy.model, DistributedDataParallel):
            values |= exposed_communication_ms(model)
        for figures in self.figures.values():
            values |= figures(times)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step - 1)


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


def gather_peak_memory_mib(strategy: Strategy) -> list[float]:
    """Peak memory of every device of every process in MiB, in rank order; every rank must call it."""
    assert strategy.lightning_module is not None
    trainer, device = strategy.lightning_module.trainer, strategy.root_device
    measured = map(peak_memory_bytes, process_devices(strategy))  # None for the CPU
    values = [(peak_resident_bytes() if size is None else size) / MIB for size in measured]
    places = torch.zeros(trainer.world_size, len(values), dtype=precise_dtype(device), device=device)
    # a rank that sees no others has a number of its own all the same
    places[trainer.global_rank if trainer.world_size > 1 else 0] = torch.tensor(values, dtype=places.dtype)
    return strategy.reduce(places, reduce_op="sum").flatten().tolist()  # pyright: ignore[reportAttributeAccessIssue]  # of a tensor a tensor


def peak_resident_bytes() -> int:
    """Peak resident size in bytes, since the last reset if the system supports resets (Linux)."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        line = next(line for line in lines if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peaks(devices: Iterable[torch.device]) -> None:
    """Reset the peaks, which may stem from an earlier run in this process, such as another job of a sweep."""
    for device in filter(has_streams, devices):
        torch.accelerator.reset_peak_memory_stats(device)
    with suppress(OSError):  # that of the CPU, on Linux: proc_pid_clear_refs(5)
        Path("/proc/self/clear_refs").write_text("5")
