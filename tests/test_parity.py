"""Law 1: every strategy trains as one device does. Add a strategy to PLANS; the cases are in tests/parity.py."""

from collections.abc import Callable
from typing import Any

import pytest
from parity import CASES, assert_equal, baseline, run

from evener.strategies import DataParallelStrategy

Plan = tuple[int, Callable[..., Any]]

PLANS: dict[str, Plan] = {
    **{f"dp-{num}": (num, DataParallelStrategy) for num in range(1, 5)},
}
"""Number of devices and strategy, by name."""


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CASES)
def test_training_equals_one_device(name: str, plan: str) -> None:
    case, (num_devices, strategy) = CASES[name], PLANS[plan]
    assert_equal(run(case, strategy(**case.strategy), devices=num_devices), baseline(case), case.tolerance)
