"""FSDP trains as one device does, with a part of everything on each rank."""

import warnings
from itertools import chain
from typing import Any

import pytest
import torch
from distributed import run_ranks
from parity import CASES as WAYS
from parity import Run, assert_equal, baseline, run
from regression import NUM_SAMPLES, fit, fit_all, outcome

from evener.strategies import FSDPStrategy, SingleDeviceStrategy

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffled": {"shuffle": True},
    "accumulated": {"trainer": {"accumulate_grad_batches": 2}},
    "clipped": {"trainer": {"gradient_clip_val": 0.1}},
    "clipped by value": {"trainer": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}},
    "weighted": {"weighted": True},
    "few samples": {"num": 13},
}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_fsdp_trains_as_one_device_does(num_ranks: int) -> None:
    by_rank = run_ranks(fit_all, num_ranks, FSDPStrategy, CASES, 6, num_ranks, timeout_s=300)
    for (name, batch_size_is), first in by_rank[0].items():
        single = outcome(*fit(SingleDeviceStrategy(), 1, 6, CASES[name]))
        ranks = [outcomes[name, batch_size_is] for outcomes in by_rank]
        for rank in ranks:
            torch.testing.assert_close(rank["weights"], single["weights"], rtol=0, atol=1e-10)
        assert first["metrics"] == pytest.approx(single["metrics"], abs=1e-12), name
        trained = sorted(chain(*(index for rank in ranks for index in rank["trained"])))
        assert trained == sorted(chain(*single["trained"])), name
        seen = sorted(index for rank in ranks for index in rank["validated"])
        assert seen == sorted(2 * list(range(CASES[name].get("num", NUM_SAMPLES)))), name


GATHERED: dict[str, Any] = {"groups_and_penalty": {"shard": []}}
"""Options of the ways to train that need them: a penalty on weights outside of their layer's forward."""

SUMMED = ("sum",)
"""Ways to train that a strategy of ranks serves by `loss_weight` only."""


def _run_all(num_ranks: int) -> dict[str, Run]:
    warnings.simplefilter("ignore")  # Lightning's advice on workers and the like
    found = {}
    for name, way in WAYS.items():
        if name not in SUMMED:
            strategy = FSDPStrategy(batch_size_is="global", timeout_s=120, **GATHERED.get(name, {}))
            found[name] = run(way, strategy, devices=num_ranks)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_way_to_train_equals_one_device(num_ranks: int) -> None:
    first, *_ = run_ranks(_run_all, num_ranks, num_ranks, timeout_s=500)
    for name, found in first.items():
        assert_equal(found, baseline(WAYS[name]), WAYS[name].tolerance, of_a_rank=True)
