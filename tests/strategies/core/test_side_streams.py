"""Copies beside the work of two devices: when they begin and end, on the clock of late devices.

Every operation takes a second, and every copy ten.
"""

from collections.abc import Callable
from typing import Any

import late_device
import pytest
import torch
from late_device import Delays, needs_late_device
from torch import Tensor, nn

from evener.strategies.core.transfers import beside, cross, finish_beside, finish_copy, from_host, start_copy

pytestmark = needs_late_device


def here() -> torch.device:
    return torch.device("late:0")  # in a process where it exists


def there() -> torch.device:
    return torch.device("late:1")


def timeline(steps: Callable[[dict[str, Tensor]], None]) -> list[tuple[str, float, float]]:
    """Names (`copy`, or `add` with its device), begins and ends of operations, from the first on."""
    late_device.set_delays(Delays(kernel=1.0, copy=10.0))
    tensors = {"here": torch.ones(2, device=here()), "there": torch.ones(2, device=there())}
    torch.accelerator.synchronize(here())
    torch.accelerator.synchronize(there())
    since = late_device.clock()
    with late_device.traced() as spans:
        steps(tensors)
        found = spans()
    named = [(f"{'copy' if name == 'copy' else 'work'} {device}", begin, end) for device, _, name, begin, end in found]
    return [(name, begin - since, end - since) for name, begin, end in named]


def _beside(tensors: dict[str, Tensor]) -> None:
    copies, arrived = start_copy([tensors["here"]], there())
    with beside(there()):
        finish_copy(copies, arrived)
        copies[0].add_(1)
    tensors["there"] + 1
    finish_beside(copies)
    copies[0] + 1


def _next_batch(tensors: dict[str, Tensor]) -> None:
    first = from_host({"x": torch.ones(2)}, there())
    first["x"] + 1
    second = from_host({"x": torch.ones(2)}, there())
    second["x"] + 1


TIMELINES: dict[str, tuple[Any, list[tuple[str, float, float]]]] = {
    "work beside a device follows the copy alone": (
        _beside, [("copy 0", 0, 10), ("work 1", 10, 11), ("work 1", 0, 1), ("work 1", 11, 12)]
    ),
    "the next batch is copied while the device computes this one": (
        _next_batch, [("copy 1", 0, 10), ("work 1", 10, 11), ("copy 1", 10, 20), ("work 1", 20, 21)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TIMELINES)
def test_copies_and_work_are_as_early_as_they_can_be(name: str) -> None:
    steps, expected = TIMELINES[name]
    found = late_device.run(timeline, steps)
    assert found == expected


def _there_and_back() -> tuple[list[bool], list[float], list[float]]:
    late_device.set_delays(Delays(kernel=1.0, copy=10.0))
    own = nn.Parameter(torch.ones(2, device=here()))
    moved, finish = cross([own, torch.arange(3, device=here()), torch.ones(3, device=here())], there())
    finish()
    with late_device.traced() as spans:
        (moved[0] * 3).sum().backward()
        copies = [(begin, end) for _, _, name, begin, end in spans() if name == "copy"]
    assert own.grad is not None
    return [tensor.requires_grad for tensor in moved], own.grad.tolist(), [end - begin for begin, end in copies]


def test_gradients_go_back_and_only_where_there_are_some() -> None:
    assert late_device.run(_there_and_back) == ([True, False, False], [3.0, 3.0], [10.0])


def _freed_source() -> list[float]:
    late_device.set_delays(Delays(kernel=1.0, copy=10.0))
    first, second = torch.ones(2, device=here()), torch.ones(2, device=here()) * 2
    start_copy([first], there())
    copies, arrived = start_copy([second], there())
    del second  # the first copy is still on its way
    finish_copy(copies, arrived)
    return (copies[0] + 0).tolist()


def test_the_memory_of_a_source_is_not_used_again_before_its_copy_is_made() -> None:
    assert late_device.run(_freed_source) == [2.0, 2.0]
