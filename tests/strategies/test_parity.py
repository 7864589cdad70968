"""Law 1: every strategy trains as one device does. Add a strategy to PLANS; the cases are in support/parity.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
from parity import CASES, Case, assert_equal, baseline, run

from evener.strategies import BalancedDataParallelStrategy, DataParallelStrategy, ModelParallelStrategy

InOrder = partial(ModelParallelStrategy, deterministic=True)
Plan = tuple[int, Callable[..., Any]]


def balanced(**policy: Any) -> Callable[..., Any]:
    return lambda **options: BalancedDataParallelStrategy(**policy, **options)


PLANS: dict[str, Plan] = {
    **{f"dp-{num}": (num, DataParallelStrategy) for num in range(1, 5)},
    "dp-threads": (3, lambda **options: DataParallelStrategy(threads=True, **options)),
    "balanced_dp-gpu0_chunk=0": (3, balanced(gpu0_chunk=0)),
    "balanced_dp-gpu0_chunk=1": (2, balanced(gpu0_chunk=1)),
    "balanced_dp-weights=1,0,3": (3, balanced(weights=[1, 0, 3])),
    "balanced_dp-weights=0,1": (2, balanced(weights=[0, 1])),
    "balanced_dp-auto": (2, balanced(weights="auto")),
    **{f"model_parallel-2-{m}": (2, partial(InOrder, num_microbatches=m)) for m in range(1, 5)},
    "model_parallel-2-3-threads": (2, partial(ModelParallelStrategy, num_microbatches=3, deterministic=False)),
}
"""Number of devices and strategy, by name; for model_parallel devices are stages, then come micro-batches."""


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
