"""Law 1: every strategy trains as one device does. See support/parity.py."""

from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from parity import (
    CASES,
    PLANS,
    RANK_PLANS,
    Case,
    Plan,
    Ranks,
    Run,
    Shards,
    assert_equal,
    balanced,
    baseline,
    run,
)  # fmt: skip
from stage_modules import DEEP

from evener.strategies import DDPModelParallelStrategy


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


OF_PROCESSES = ("sum",)
"""Ways to train that a strategy of ranks serves by `loss_weight` only."""
GATHERED: dict[str, Any] = {"groups_and_penalty": {"shard": []}}
"""Options of fsdp for the ways to train that need them: a penalty on weights outside of their layer's forward."""


def _run_all(plan: str) -> dict[str, Run]:
    num_ranks, strategy = RANK_PLANS[plan]
    given = GATHERED if plan.startswith("fsdp") else {}
    names = [name for name in CASES if name not in OF_PROCESSES]
    return {name: run(CASES[name], strategy(**given.get(name, {})), devices=num_ranks) for name in names}


@pytest.mark.parametrize(
    "plan", [name if name == "fsdp-2" else pytest.param(name, marks=pytest.mark.slow) for name in RANK_PLANS]
)
def test_training_on_ranks_equals_one_device(plan: str) -> None:
    first, *_ = run_ranks(_run_all, RANK_PLANS[plan][0], plan, timeout_s=500)
    for name, found in first.items():
        assert_equal(found, baseline(CASES[name]), CASES[name].tolerance, of_a_rank=True)


RECOMPUTED: dict[str, Plan] = {
    "ddp": (2, Ranks),
    "ddp of two replicas": (4, partial(Ranks, devices_per_process=2)),
    "ddp_model_parallel": (4, partial(DDPModelParallelStrategy, num_microbatches=2, batch_size_is="global")),
    "fsdp": (2, Shards),
    "fsdp of blocks": (2, partial(Shards, ["net.blocks.0", "net.blocks.1", "net.blocks.2.linear"])),
    "fsdp that keeps parts": (2, partial(Shards, reshard_after_forward=False)),
}


def _run_recomputed() -> dict[str, Run]:
    return {name: run(DEEP, make(recompute="always"), devices=num) for name, (num, make) in RECOMPUTED.items()}


@pytest.mark.slow
def test_ranks_that_recompute_train_as_one_device() -> None:
    first, other = run_ranks(_run_recomputed, 2)
    for name, found in first.items():
        assert_equal(found, baseline(DEEP), 1e-10, of_a_rank=True)
        torch.testing.assert_close(other[name].weights, found.weights, rtol=0, atol=1e-10)
