"""strategy=ddp_model_parallel: ranks of stages train as one device does.

They reduce gradients while the last micro-batch goes backward; when: late_device/test_late_overlap.py.
"""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from distributed import run_ranks
from parity import CASES as WAYS
from parity import Case, GroupsNet, Net, Run, SumNet, TokenNet, assert_equal, baseline, run
from stage_modules import DEEP, DeepNet, SquareNet
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


class SumAndMean(SumNet):
    """A sum beside a mean over samples."""

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) + self(batch[0]).pow(2).mean()


CASES = {
    "ragged": Case(DeepNet, num=22, batch_size=7, trainer={"gradient_clip_val": 0.1}),
    "loss_weight": Case(TokenNet, num=11, batch_size=5),
    "tied": Case(SquareNet, num=11, batch_size=5),
    "unused": Case(SometimesUnused, num=12, batch_size=6),
    "again": Case(partial(Again, True), num=12, batch_size=6),
    "again in a function": Case(partial(Again, True, called=False), num=12, batch_size=6),
    "again in one backward": Case(partial(Again, False), num=12, batch_size=6),
    "accumulated, clipped": DEEP,
    "groups": Case(GroupsNet, num=9),
    "sums": Case(SumAndMean, num=9),
    "exact accumulation": WAYS["exact_accumulation_of_weights"],
    "smaller than ranks": Case(GroupsNet, num=5, batch_size=2),
    "bf16": replace(WAYS["bf16"], module=GroupsNet),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "views": {"gradient_as_bucket_view": True},
    "uneven": {"weights": [3, 1]},
    "optimizer shards": {"shard_optimizer": True},
    "whole": {"num_microbatches": 1},
    "three": {"num_microbatches": 3},
    "measured": {"weights": "auto"},
}
FEW = [
    *((case, "1f1b") for case in CASES if case != "tied"),
    *(("ragged", "uneven"), ("loss_weight", "measured"), ("groups", "whole"), ("sums", "three")),
]
ALL = [(case, way) for case in [*CASES][:7] for way in [*OPTIONS][:5] if (case, way) != ("unused", "uneven")]
"""In `unused` each rank has three samples of six."""


def _train(runs: list[tuple[str, str]]) -> dict[tuple[str, str], Run]:
    warnings.simplefilter("ignore")  # a way back to stage 0
    found = {}
    for case, way in runs:
        even = partial(DDPModelParallelStrategy, batch_size_is="global")
        kind: Any = BalancedDDPModelParallelStrategy if "weights" in OPTIONS[way] else even
        # the loss of `unused` depends on the places of samples
        options = {"num_microbatches": 2, "verify": case != "unused", **OPTIONS[way]}
        found[case, way] = run(CASES[case], kind(bucket_cap_mb=1e-4, timeout_s=60, **options), devices=4)
    return found


@pytest.mark.filterwarnings("ignore")  # Lightning's advice, and a way back to stage 0
@pytest.mark.parametrize(
    "runs", [FEW, pytest.param(sorted({*ALL} - {*FEW}), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_ranks_of_stages_train_as_one_device(runs: list[tuple[str, str]]) -> None:
    first, second = run_ranks(_train, 2, runs, timeout_s=400)
    for (case, way), found in first.items():
        assert_equal(found, baseline(CASES[case]), CASES[case].tolerance, of_a_rank=True)
        assert torch.equal(found.weights, second[case, way].weights), f"{case}, {way}: ranks have gone apart"
