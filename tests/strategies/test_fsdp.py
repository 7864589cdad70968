"""FSDP trains as one device does, with a part of everything on each rank."""

from itertools import chain
from typing import Any

import pytest
import torch
from distributed import run_ranks
from regression import NUM_SAMPLES, fit, outcome

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


def _fit_all(global_batch: int, num_ranks: int) -> dict[str, Any]:
    outcomes = {}
    for name, case in CASES.items():
        for batch_size_is in ("global", "per_device"):
            batch_size = global_batch if batch_size_is == "global" else global_batch // num_ranks
            strategy = FSDPStrategy(batch_size_is=batch_size_is, timeout_s=120)
            outcomes[name, batch_size_is] = outcome(*fit(strategy, num_ranks, batch_size, case))
    return outcomes


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_fsdp_trains_as_one_device_does(num_ranks: int) -> None:
    by_rank = run_ranks(_fit_all, num_ranks, 6, num_ranks, timeout_s=300)
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
