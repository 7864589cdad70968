"""Ranks gather the parts of a module in one order: parts that samples choose are gathered for the whole step."""

from typing import Any

import pytest
import torch
from distributed import RankError, run_ranks
from regression import Net, Numbered, quiet_trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.strategies import FSDPStrategy, SingleDeviceStrategy


class Experts(Net):
    """Each sample is computed by the expert that it chooses; under two ranks, the even one and the odd one."""

    def __init__(self, since: int = 0) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)).double()
        self.since = since

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, index = batch
        hidden = self.net[1](self.net[0](x))
        for i, expert in enumerate(self.experts):
            chosen = index % 2 == i
            if self.global_step < self.since:
                hidden = expert(hidden)
            elif chosen.any():
                hidden = hidden + torch.zeros_like(hidden).index_put((chosen,), expert(hidden[chosen]))
        return (self.net[2](hidden) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trained(num_ranks: int, options: dict[str, Any], since: int = 0) -> Tensor:
    module = Experts(since)
    given = {"batch_size_is": "global", "find_unused_parameters": True, "timeout_s": 60} | options
    strategy = SingleDeviceStrategy() if num_ranks == 1 else FSDPStrategy(**given)
    quiet_trainer(strategy, num_ranks, max_epochs=1, limit_train_batches=3).fit(module, DataLoader(Numbered(8), 2))
    return weights(module)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"shard": []}], ids=str)
def test_experts_that_samples_choose_train_as_on_one_device(options: dict[str, Any]) -> None:
    for found in run_ranks(_trained, 2, 2, options):
        torch.testing.assert_close(found, _trained(1, {}), rtol=0, atol=1e-10)


@pytest.mark.parametrize("since", [0, 2])
def test_ranks_that_gather_other_parts_are_refused_before_they_mix_them(since: int) -> None:
    given = {"shard": ["experts.0", "experts.1"]}
    with pytest.raises(RankError, match=r"gathering experts\..', but rank \d .* set strategy\.shard=\[\]"):
        run_ranks(_trained, 2, 2, given, since)
