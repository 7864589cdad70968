"""The late device itself: what it must show for the tests that run on it to mean anything."""

import late_device
import torch
from late_device import Delays, needs_late_device

pytestmark = needs_late_device


def _order() -> list[list[float]]:
    late_device.set_delays(Delays(kernel=1.0, copy=1.0))
    side, x = torch.Stream("late:0"), torch.arange(4.0, device="late:0")
    torch.accelerator.synchronize("late:0")
    with side:
        doubled = x * 2
    without_a_wait = (doubled + 1).tolist()
    with side:
        doubled = x * 2
    torch.accelerator.current_stream("late:0").wait_stream(side)
    after_a_wait = (doubled + 1).tolist()
    with side:
        late_device.set_delays(Delays(kernel=5.0))
        read = (x + 0) * 0 + x  # x is still read when it is freed
    del x
    torch.accelerator.current_stream("late:0").wait_stream(side)
    return [without_a_wait, after_a_wait, read.tolist()]


def test_what_is_not_ordered_reads_poison_and_what_is_ordered_does_not() -> None:
    without_a_wait, after_a_wait, freed_while_read = late_device.run(_order)
    assert after_a_wait == [1.0, 3.0, 5.0, 7.0]
    assert torch.tensor(without_a_wait + freed_while_read).isnan().all()


def _clock() -> tuple[float, float, float]:
    late_device.set_delays(Delays(kernel=2.0, copy=1.0, by_name=[("aten::mm.out", 7.0)]))
    x = torch.ones(2, 2, device="late:0")
    since = late_device.clock()
    x @ x + 1  # 7 + 2
    one_stream = late_device.clock() - since
    since, side = late_device.clock(), torch.Stream("late:0")
    x + 1
    side.wait_event(torch.accelerator.current_stream("late:0").record_event())
    x + 1
    with side:
        x.to("late:1", non_blocking=True)  # beside the second addition
    two_streams = late_device.clock() - since
    start, end = (torch.Event("late:0", enable_timing=True) for _ in range(2))
    start.record()
    x @ x
    end.record()
    end.synchronize()
    return one_stream, two_streams, start.elapsed_time(end)


def test_the_clock_adds_what_is_in_order_and_overlaps_what_is_not() -> None:
    assert late_device.run(_clock) == (9.0, 4.0, 7000.0)


def _waits() -> tuple[int, list[str]]:
    pinned = torch.ones(3).pin_memory()
    with late_device.host_waits() as waits:
        x = pinned.to("late:0", non_blocking=True)
        loss = (x * 2).sum()
        torch.nn.functional.dropout(x, 0.5)
        torch.zeros((), device="late:0").add_(1.0)
        num_before = len(waits)
        loss.item()
        torch.tensor(1.0, device="late:0")
        x.nonzero()
        torch.accelerator.synchronize()
    return num_before, waits


def test_what_makes_the_host_wait_is_named_with_its_stack() -> None:
    num_before, waits = late_device.run(_waits)
    assert num_before == 0
    names = ["item: a number is read", "copy from the host", "aten::nonzero: its shape is known after it has run"]
    assert [wait.splitlines()[0] for wait in waits] == [*names, "synchronize a device"]
    assert "loss.item()" in waits[0]
