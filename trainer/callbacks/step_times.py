"""Split the time of training steps into its parts, using the host's clock, and events for what a device computes."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import pytorch_lightning as pl
import torch
from torch.nn.parallel import DistributedDataParallel

from ...strategies.core.devices import is_accelerator, seconds_between, time_mark

NS_PER_MS = 1e6

PHASES: Sequence[str] = ("forward", "backward", "optimizer")

Mark: TypeAlias = float | torch.Event
"""A point in time, by the host's clock or on a device."""

SAMPLES_PER_POINT = 10
"""Steps between two log points whose times torch's DDP records."""


class DDPTimes:
    """Reads the times of the last step that torch sampled.

    Args:
        model: the DDP wrapper, which records the times of one step in `every`.
        every: number of batches between two samples.

    Source: `torch/nn/parallel/distributed.py` (torch 2.13), `_get_ddp_logging_data`.
    """

    def __init__(self, model: DistributedDataParallel, every: int) -> None:
        self._model = model
        self.every = every
        model._set_ddp_runtime_logging_sample_rate(every)

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "DDPTimes | None":
        """The times of a trainer's DDP wrapper, sampled a few times per log point; None without a DDP wrapper."""
        model = trainer.strategy.model
        every: int = getattr(trainer, "log_every_n_steps")  # noqa: B009  # Lightning sets it undeclared
        if not isinstance(model, DistributedDataParallel) or not every:
            return None
        return cls(model, max(1, every * trainer.accumulate_grad_batches // SAMPLES_PER_POINT))

    def exposed_communication_ms(self) -> float | None:
        """Milliseconds of gradient communication beside backward, including waits for other ranks."""
        total, overlap = self._ms("backward_comm_time"), self._ms("backward_compute_comm_overlap_time")
        return None if total is None or overlap is None else max(0.0, total - overlap)

    def own_compute_s(self) -> float | None:
        """Seconds of this rank's forward and backward pass, without waiting for other ranks."""
        forward, backward = self._ms("forward_compute_time"), self._ms("backward_compute_time")
        return None if forward is None or backward is None else (forward + backward) / 1000

    def _ms(self, name: str) -> float | None:
        """Milliseconds of one of torch's figures; None until it has sampled a step."""
        data: dict[str, Any] = self._model._get_ddp_logging_data()
        return int(data[name]) / NS_PER_MS if name in data else None


@dataclass(frozen=True)
class StepTimes:
    """Means over the optimizer steps between two readings.

    Args:
        step_ms: milliseconds from step to step, validation excluded.
        compute_ms: milliseconds from a batch's arrival on the root device to the end of its step there.
        data_wait_ms: milliseconds of waiting for the loader.
        samples_per_s: training samples per second.
        phases_ms: `compute_ms` by phase; all of it is `forward` if nobody has told the clock of others.
    """

    step_ms: float
    compute_ms: float
    data_wait_ms: float
    samples_per_s: float
    phases_ms: dict[str, float]


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

    def read(self, num_steps: int, data_wait_s: float = 0.0) -> StepTimes | None:
        """Read the means since the last reading, between two steps; waits for the device. None if no time has passed.

        Args:
            num_steps: optimizer steps since then.
            data_wait_s: seconds of waiting for the loader since the start of training.
        """
        while self._queued:
            self._add_oldest()
        now = [self.seconds, data_wait_s, self.num_samples, *self._phases_s.values()]
        seconds, wait, samples, *phases = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        if seconds <= 0 or num_steps < 1:
            return None
        step_ms, wait_ms, *each_ms = (1000 * value / num_steps for value in (seconds, wait, *phases))
        phases_ms = dict(zip(PHASES, each_ms, strict=True))
        return StepTimes(step_ms, sum(each_ms), wait_ms, samples / seconds, phases_ms)
