"""Where the time of a step went, from clocks that the tests set."""

from typing import Any

import pytest
import torch

from evener.strategies.core import devices
from evener.trainer.callbacks.step_times import DDPTimes, StepClock


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def test_step_times_are_means_per_optimizer_step() -> None:
    now = Clock()
    clock = StepClock(now)
    clock.go()
    for wait, compute in ((0.5, 1.0), (0.5, 2.0)):
        now.s += wait
        clock.enter("forward")
        now.s += compute
        clock.enter(None)
        clock.num_samples += 8
    clock.pause()
    now.s += 1000  # validation
    clock.go()
    times = clock.read(num_steps=2, data_wait_s=0.6)
    assert times == pytest.approx({
        "samples_per_s": 16 / 4, "step_ms": 2000, "compute_ms": 1500, "data_wait_ms": 300,
        "forward_ms": 1500, "backward_ms": 0, "optimizer_ms": 0,
    })  # fmt: skip
    now.s += 5
    later = clock.read(num_steps=1, data_wait_s=0.7)
    assert [later[name] for name in ("step_ms", "compute_ms", "data_wait_ms")] == pytest.approx([5000, 0, 100])
    assert clock.read(num_steps=1, data_wait_s=0.7) == {}
    assert clock.seconds == pytest.approx(9)


def test_communication_is_what_backward_does_not_hide() -> None:
    class Wrapper:
        data: dict[str, int] = {}  # noqa: RUF012
        logger: object = "torch's, which records"

        def _set_ddp_runtime_logging_sample_rate(self, every: int) -> None:
            self.every = every

        def _get_ddp_logging_data(self) -> dict[str, int]:
            return self.data

    wrapper: Any = Wrapper()
    times = DDPTimes(wrapper, every=10)
    assert wrapper.every == 10
    assert times.exposed_communication_ms() is None
    assert times.own_compute_s() is None
    wrapper.data = {
        "backward_comm_time": 9_000_000, "backward_compute_comm_overlap_time": 2_500_000,
        "forward_compute_time": 1_000_000, "backward_compute_time": 3_000_000,
    }  # fmt: skip
    assert times.exposed_communication_ms() == 6.5
    assert times.own_compute_s() == pytest.approx(0.004)
    wrapper.logger = None  # the ranks have lost one, and go on with another wrapper
    assert times.exposed_communication_ms() is None


def test_what_a_device_computes_is_measured_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake device that finishes its work 3 s after the host has queued it."""
    now = Clock()
    waits: list[float] = []

    class Event:
        def __init__(self, device: torch.device, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "stream of cuda:1"
            self.at = now.s + 3

        def query(self) -> bool:
            return now.s >= self.at

        def synchronize(self) -> None:
            if not self.query():
                waits.append(self.at)

        def elapsed_time(self, end: Any) -> float:
            return (end.at - self.at) * 1000

    monkeypatch.setattr(devices.torch, "Event", Event)
    monkeypatch.setattr(devices, "current_stream", lambda device: f"stream of {device}")
    clock = StepClock(now)
    clock.measure_on(torch.device("cuda", 1))
    clock.go()
    for _ in range(4):
        clock.enter("forward")
        now.s += 2
        clock.enter(None)
        clock.num_samples += 8
    assert waits == []
    times = clock.read(num_steps=4, data_wait_s=0.0)
    assert times["compute_ms"] == pytest.approx(2000)
    assert waits == [109.0, 111.0]  # the others had finished when a later batch ended
