"""Seconds of a chunk on an accelerator, on the clock of late devices."""

import late_device
import torch
from late_device import Delays, needs_late_device

from evener.strategies.replicas.measurement import Reading


def _read() -> tuple[bool, bool, float]:
    device = torch.device("late:1")  # not the calling thread's current one
    late_device.set_delays(Delays(kernel=2.0))
    x = torch.ones(2, device=device)
    torch.accelerator.synchronize(device)
    reading = Reading()
    reading.of(lambda: x + 1, device, None)
    was_ready = reading.is_ready()
    torch.accelerator.synchronize(device)
    return was_ready, reading.is_ready(), reading.seconds


@needs_late_device
def test_a_chunk_is_timed_on_its_own_device_which_nothing_waits_for() -> None:
    assert late_device.run(_read) == (False, True, 2.0)
