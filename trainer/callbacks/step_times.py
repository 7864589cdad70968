"""Split the time of training steps into its parts, using the host's clock, and events for what a device computes."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch.nn.parallel import DistributedDataParallel

from ...strategies.core.devices import is_accelerator, seconds_between, time_mark

NS_PER_MS = 1e6

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
        """Milliseconds of gradient communication that did not overlap with backward, including waits for other ranks.

        Returns:
            None until torch has sampled a step.
        """
        data: dict[str, Any] = self._model._get_ddp_logging_data()
        if "backward_comm_time" not in data:
            return None
        return max(0, int(data["backward_comm_time"]) - int(data["backward_compute_comm_overlap_time"])) / NS_PER_MS

    def own_compute_s(self) -> float | None:
        """Seconds of this rank's forward and backward pass, without waiting for other ranks."""
        data: dict[str, Any] = self._model._get_ddp_logging_data()
        if "backward_compute_time" not in data:
            return None
        return (int(data["forward_compute_time"]) + int(data["backward_compute_time"])) / NS_PER_MS / 1000


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


class Spans:
    """Adds up the seconds of spans: by the host's clock, or on an accelerator for what is queued in them.

    Nothing waits for an accelerator until they are read.

    Args:
        mark: marks the present, as `time_mark` does.
    """

    def __init__(self, mark: Callable[[], float | torch.Event]) -> None:
        self._mark = mark
        self._start: float | torch.Event | None = None
        self._ended: deque[tuple[float | torch.Event, float | torch.Event]] = deque()
        self._seconds = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a span has begun and not ended."""
        return self._start is not None

    def start(self) -> None:
        """Begin a span, after what is queued now."""
        self._start = self._mark()

    def stop(self) -> None:
        """End it, after what is queued now."""
        if self._start is not None:
            self._ended.append((self._start, self._mark()))
            self._start = None
        while self._ended and (not isinstance(mark := self._ended[0][1], torch.Event) or mark.query()):
            self._seconds += seconds_between(*self._ended.popleft())

    def seconds(self) -> float:
        """The seconds of all spans so far, of one that has not ended, too; waits for the device."""
        while self._ended:
            self._seconds += seconds_between(*self._ended.popleft())
        return self._seconds + (0.0 if self._start is None else seconds_between(self._start, self._mark()))


class StepPhases:
    """Splits the time of training steps between phases that follow each other.

    Args:
        names: of the phases.
        now: reads a monotonic clock, in seconds.
    """

    def __init__(self, names: Sequence[str], now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._spans = {name: Spans(now) for name in names}
        self._read = dict.fromkeys(names, 0.0)
        self._current: str | None = None

    def measure_on(self, device: torch.device) -> None:
        """Measure from now on what a device computes; by the host's clock if it is a CPU."""
        mark = partial(time_mark, device) if is_accelerator(device) else self._now
        self._spans = {name: Spans(mark) for name in self._spans}
        self._read, self._current = dict.fromkeys(self._spans, 0.0), None

    def enter(self, name: str | None) -> None:
        """Begin a phase, which ends the current one; None only ends it."""
        if self._current is not None:
            self._spans[self._current].stop()
        self._current = name
        if name is not None:
            self._spans[name].start()

    def read_ms(self, num_steps: int) -> dict[str, float]:
        """Milliseconds per step of each phase since the last reading."""
        seconds = {name: spans.seconds() for name, spans in self._spans.items()}
        before, self._read = self._read, seconds
        return {name: (seconds[name] - before[name]) * 1000 / num_steps for name in seconds}


class StepClock:
    """Adds up the seconds of batches, and of the phases of their steps, until they are read.

    Args:
        now: reads a monotonic clock, in seconds.

    Attributes:
        num_samples: samples so far.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._training = Spans(now)
        self._steps = StepPhases(("forward", "backward", "optimizer"), now)
        self.measure_on, self.enter = self._steps.measure_on, self._steps.enter
        self.num_samples = 0
        self._last = (0.0, 0.0, 0)

    @property
    def seconds(self) -> float:
        """Seconds of training so far, pauses excluded."""
        return self._training.seconds()

    def go(self) -> None:
        """Start, or resume after a pause."""
        if not self._training.is_open:
            self._training.start()

    def pause(self) -> None:
        """Pause, for anything that is not training."""
        self._training.stop()

    def start_batch(self) -> None:
        """Record that a batch has arrived."""
        self.enter("forward")

    def end_batch(self, num_samples: int) -> None:
        """Record that its step has ended."""
        self.enter(None)
        self.num_samples += num_samples

    def read(self, num_steps: int, data_wait_s: float) -> StepTimes | None:
        """Read the means since the last reading.

        Args:
            num_steps: optimizer steps since then.
            data_wait_s: seconds of waiting for the loader since the start of training.

        Returns:
            The means; None if no time has passed.
        """
        current = (self.seconds, data_wait_s, self.num_samples)
        seconds, wait, samples = (new - old for new, old in zip(current, self._last, strict=True))
        self._last = current
        phases_ms = self._steps.read_ms(max(1, num_steps))
        if seconds <= 0 or num_steps < 1:
            return None
        to_ms = 1000 / num_steps
        return StepTimes(seconds * to_ms, sum(phases_ms.values()), wait * to_ms, samples / seconds, phases_ms)
