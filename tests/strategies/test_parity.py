"""Law 1: every strategy trains as one device does. See support/plans.py and support/parity.py."""

from typing import Any

import pytest
import pytorch_lightning as pl
from parity import CASES, Case, assert_equal, baseline, run
from plans import PLANS, balanced


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CASES)
def test_training_equals_one_device(name: str, plan: str) -> None:
    case, (num_devices, strategy) = CASES[name], PLANS[plan]
    assert_equal(run(case, strategy(**case.strategy), devices=num_devices), baseline(case), case.tolerance)


@pytest.mark.parametrize("case", [CASES["ragged"], CASES["accumulation_with_a_short_tail"], CASES["dict"]])
@pytest.mark.parametrize("strategy", ["dp", "balanced_dp", balanced(weights=[1, 3])])
def test_training_equals_one_device_under_a_stock_trainer(case: Case, strategy: Any) -> None:
    """Pain 25: `strategy="dp"` works in Lightning again, and its loss curve is one device's."""
    found = run(case, strategy if isinstance(strategy, str) else strategy(), pl.Trainer, devices=2)
    assert_equal(found, run(case, "auto", pl.Trainer, devices=1), case.tolerance)
