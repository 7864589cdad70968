"""Ranks reduce gradients while the last micro-batch goes backward; when: late_device/test_late_overlap.py."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from distributed import run_ranks
from parity import Case, Net, TokenNet, baseline, run
from stage_modules import DeepNet, SquareNet
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.strategies import BalancedDDPModelParallelStrategy, DDPModelParallelStrategy


class SometimesUnused(Net):
    """A layer for some samples only, none of which is in the last micro-batch of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        if len(x) == 1:
            return out
        chosen = torch.arange(len(x)) % 3 != 2
        return out + torch.zeros_like(out).index_put((chosen.nonzero()[:, 0],), self.side(x[chosen]))


class Again(Net):
    """Runs one layer twice, computed again in the backward pass: with `use_reentrant` gradients arrive one by one."""

    def __init__(self, use_reentrant: bool, called: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        self.use_reentrant, self.called = use_reentrant, called

    def again(self, x: Tensor) -> Tensor:
        layer = self.net[1]
        return layer(x) if self.called else nn.functional.linear(x, layer.weight, layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[0](x)
        for _ in range(2):
            x = checkpoint(self.again, x, use_reentrant=self.use_reentrant)
        return self.net[2](x)


CASES = {
    "ragged": Case(DeepNet, num=22, batch_size=7, trainer={"gradient_clip_val": 0.1}),
    "loss_weight": Case(TokenNet, num=11, batch_size=5),
    "tied": Case(SquareNet, num=11, batch_size=5),
    "unused": Case(SometimesUnused, num=12, batch_size=6),
    "again": Case(partial(Again, True), num=12, batch_size=6),
    "again in a function": Case(partial(Again, True, called=False), num=12, batch_size=6),
    "again in one backward": Case(partial(Again, False), num=12, batch_size=6),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "views": {"gradient_as_bucket_view": True},
    "uneven": {"weights": [3, 1]},
    "optimizer shards": {"shard_optimizer": True},
}
FEW = [(case, "1f1b") for case in CASES if case not in ("ragged", "tied")]
ALL = [(case, way) for case in CASES for way in OPTIONS if (case, way) != ("unused", "uneven")]
"""In `unused` each rank has three samples of six."""


def _train(runs: list[tuple[str, str]]) -> dict[Any, tuple[Tensor, Tensor]]:
    warnings.simplefilter("ignore")  # Lightning's advice
    found = {}
    for case, way in runs:
        even = partial(DDPModelParallelStrategy, batch_size_is="global")
        kind: Any = BalancedDDPModelParallelStrategy if way == "uneven" else even
        options = OPTIONS[way] | {"verify": case != "unused"}  # whose loss depends on the places of samples
        one = run(CASES[case], kind(num_microbatches=2, bucket_cap_mb=1e-4, timeout_s=60, **options), devices=4)
        found[case, way] = one.weights, one.gradients
    return found


@pytest.mark.filterwarnings("ignore")  # Lightning's advice, and a way back to stage 0
@pytest.mark.parametrize(
    "runs", [FEW, pytest.param(sorted({*ALL} - {*FEW}), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_ranks_that_reduce_early_train_as_one_device(runs: list[tuple[str, str]]) -> None:
    first, second = run_ranks(_train, 2, runs, timeout_s=240)
    for (case, way), (weights, gradients) in first.items():
        one = baseline(CASES[case])
        torch.testing.assert_close(weights, one.weights, rtol=0, atol=1e-10, msg=f"{case}, {way}")
        torch.testing.assert_close(gradients, one.gradients, rtol=0, atol=1e-10, msg=f"{case}, {way}")
        assert (weights == second[case, way][0]).all(), f"{case}, {way}: ranks have gone apart"
