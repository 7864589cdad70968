"""Seconds of a chunk on an accelerator, by events of a fake device."""

from typing import Any

import pytest
import torch

from evener.strategies.core import devices
from evener.strategies.replicas.measurement import Reading


def test_a_chunk_is_timed_on_the_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the calling thread's current device, whose stream knows nothing of the chunk."""
    recorded: list[tuple[str, str]] = []
    finished: list[bool] = []

    class Event:
        def __init__(self, device: torch.device, enable_timing: bool) -> None:
            self.device = str(device)

        def record(self, stream: str) -> None:
            recorded.append((self.device, stream))

        def synchronize(self) -> None:
            assert finished, "nothing waits for a device"

        def query(self) -> bool:
            return bool(finished)

        def elapsed_time(self, end: Any) -> float:
            return 250.0

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(devices, "current_stream", lambda device: f"stream of {device}")
    reading = Reading()
    assert reading.of(lambda: "output", torch.device("cuda", 1), None) == "output"
    assert recorded == [("cuda:1", "stream of cuda:1")] * 2
    assert not reading.is_ready()
    finished.append(True)
    assert reading.is_ready()
    assert reading.seconds == 0.25
