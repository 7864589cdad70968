"""Devices that differ are told of at start-up, with the strategy that suits them."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.strategies import BalancedDataParallelStrategy, DataParallelStrategy, DDPStrategy, ModelParallelStrategy
from evener.trainer.callbacks.unequal_devices import DeviceFacts, all_device_facts, hint

CPU, SMALL, LARGE = DeviceFacts(1, math.inf), DeviceFacts(2, 24e9), DeviceFacts(2, 80e9)


@pytest.mark.parametrize(
    ("strategy", "devices", "expected"),
    [
        (DataParallelStrategy(), [SMALL, SMALL], ""),
        (DataParallelStrategy(), [SMALL, DeviceFacts(2, 23e9)], ""),
        (DataParallelStrategy(), [SMALL, LARGE], "devices differ in memory: strategy=balanced_dp"),
        (DDPStrategy(), [SMALL, DeviceFacts(3, 24e9)], "devices differ in models: strategy=balanced_ddp"),
        (DataParallelStrategy(), [SMALL, CPU], "devices differ in models and memory: strategy=balanced_dp"),
        (BalancedDataParallelStrategy(weights="auto"), [SMALL, LARGE], ""),
        (ModelParallelStrategy(), [SMALL, LARGE], ""),  # `partition=auto` sees the memory itself
        (DDPStrategy(), [CPU, CPU], ""),
    ],
)
def test_a_hint_names_what_differs_and_what_to_set(strategy: Any, devices: list[DeviceFacts], expected: str) -> None:
    trainer: Any = SimpleNamespace(strategy=strategy)
    assert hint(trainer, devices).startswith(expected)
    assert bool(hint(trainer, devices)) == bool(expected)


def test_the_devices_of_one_process_are_asked_without_a_collective() -> None:
    strategy = DataParallelStrategy(["cpu", "cpu"])
    trainer: Any = SimpleNamespace(strategy=strategy, world_size=1)
    first, second = all_device_facts(trainer)
    assert first == second
    assert first.memory == math.inf
    assert torch.device("cpu") in strategy.process_devices
