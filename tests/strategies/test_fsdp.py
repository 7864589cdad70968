"""FSDP trains as one device does, with a part of everything on each rank."""

from itertools import chain
from typing import Any

import pytest
import torch
from distributed import RankError, run_ranks
from regression import NUM_SAMPLES, Net, Numbered, fit, fit_all, outcome, quiet_trainer
from torch.utils.data import DataLoader

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


class Penalised(Net):
    """With a penalty on the gradient of what it computes by its input."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        gradient = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]
        return (self.net(x) - batch[1]).square().mean() + gradient.square().mean()


def _fit_penalised(shard: Any) -> None:
    strategy = FSDPStrategy(shard, batch_size_is="global", timeout_s=60)
    quiet_trainer(strategy, 2, max_epochs=1).fit(Penalised(), DataLoader(Numbered(6), 3))


def test_a_gradient_penalty_is_told_to_leave_the_module_uncut() -> None:
    with pytest.raises(RankError, match=r"has released, because training_step .* Set strategy\.shard=\[\]"):
        run_ranks(_fit_penalised, 2, "auto")
    run_ranks(_fit_penalised, 2, [])
