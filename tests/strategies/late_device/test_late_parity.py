"""Every strategy of one process on late devices equals one CPU, whatever the delays of operations are."""

import warnings
from collections.abc import Callable
from typing import Any

import late_device
import pytest
import torch
from late_device import Delays, needs_late_device
from parity import CASES, assert_equal, baseline, run

from evener.strategies import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

pytestmark = needs_late_device

TWO, THREE, MIXED = ["late:0", "late:1"], ["late:0", "late:1", "late:2"], ["late:0", "cpu"]

STRATEGIES: dict[str, Callable[[], Any]] = {
    "single_device": lambda: SingleDeviceStrategy("late:0"),
    "dp": lambda: DataParallelStrategy(TWO),
    "dp of three": lambda: DataParallelStrategy(THREE),
    "dp, mixed": lambda: DataParallelStrategy(MIXED),
    "dp of stages": lambda: DataParallelStrategy([*TWO, "late:2", "late:3"], model_parallel_size=2),
    "balanced_dp": lambda: BalancedDataParallelStrategy(weights=[1, 2], devices=TWO),
    "model_parallel": lambda: ModelParallelStrategy(TWO),
    "model_parallel, mixed": lambda: ModelParallelStrategy(MIXED, num_microbatches=2),
    "1f1b": lambda: ModelParallelStrategy(TWO, num_microbatches=2),
    "gpipe": lambda: ModelParallelStrategy(TWO, num_microbatches=2, schedule="gpipe"),
    "1f1b, first": lambda: ModelParallelStrategy(TWO, num_microbatches=2, output_device="first"),
    "recompute": lambda: ModelParallelStrategy(TWO, num_microbatches=2, recompute=["net.0"]),
}
OVERLAPPING = ["dp of three", "dp of stages", "1f1b", "gpipe"]


def _unequal(cases: list[str], strategies: list[str], seeds: range) -> list[str]:
    found: list[str] = []
    for case in map(CASES.__getitem__, cases):
        expected = baseline(case)
        for name in strategies:
            for seed in seeds:
                late_device.set_delays(Delays(kernel=1e-3, copy=2e-3, seed=seed))
                try:
                    assert_equal(run(case, STRATEGIES[name](), accelerator="late", devices=1), expected, case.tolerance)
                except Exception as error:  # noqa: BLE001  # all of them in one process
                    found.append(f"{name}, seed {seed}: {type(error).__name__}: {error}")
    return found


def _trained(*args: Any) -> list[str]:
    warnings.simplefilter("ignore")
    return _unequal(*args)


@pytest.mark.parametrize("cases", [["ragged"], ["clip_by_norm", "accumulation_with_a_short_tail"]])
def test_every_strategy_on_late_devices_equals_one_cpu(cases: list[str]) -> None:
    assert late_device.run(_trained, cases, list(STRATEGIES), range(-1, 0)) == []


def _repeated(name: str) -> bool:
    warnings.simplefilter("ignore")
    late_device.set_delays(Delays(kernel=1e-3, copy=2e-3, seed=1))
    first, second = (run(CASES["ragged"], STRATEGIES[name](), accelerator="late", devices=1) for _ in range(2))
    return torch.equal(first.weights, second.weights) and torch.equal(first.gradients, second.gradients)


@pytest.mark.parametrize("name", ["1f1b", "dp of three"])
def test_equal_runs_end_with_the_same_bits(name: str) -> None:
    # Failed before: micro-batches in threads added gradients in the order of their arrival, which differed by 1e-16.
    assert late_device.run(_repeated, name)


@pytest.mark.parametrize("num", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_delays_that_are_drawn_change_no_result(num: int) -> None:
    assert late_device.run(_trained, ["ragged"], OVERLAPPING, range(num), timeout_s=500) == []
