"""Ranks reduce gradients while the last micro-batch goes backward: when, in how many buckets, and with what result."""

import warnings
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from distributed import run_ranks
from parity import Case, Net, TokenNet, baseline, run
from regression import Numbered, quiet_trainer
from stage_modules import DeepNet, SquareNet
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from evener.strategies import BalancedDDPModelParallelStrategy, DDPModelParallelStrategy

EVENTS: list[str] = []


class Passed(torch.autograd.Function):
    """The identity, which notes that a gradient has passed it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        EVENTS.append("backward")
        return grads[0]


class Half(nn.Module):
    """A stage; gradients pass between its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Passed.apply(self.first(x)))


class Halves(pl.LightningModule):
    """Two stages of two layers, with eight parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(Half(), Half()).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.stages(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Buckets(pl.Callback):
    """Notes each bucket that is reduced, one per parameter, and where each step begins."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        wrapper: Any = trainer.strategy.model
        wrapper.register_comm_hook(names, noted)

    def on_train_batch_start(self, *_: Any) -> None:
        EVENTS.append("step")


class Penalty(Buckets):
    """Might compute gradients before those of the loss."""

    def on_before_backward(self, *_: Any) -> None: ...


def noted(names: dict[int, str], bucket: dist.GradBucket) -> Future[Tensor]:
    EVENTS.extend(names[id(parameter)] for parameter in bucket.parameters())
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


WAYS: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}]
MORE_WAYS = [{"schedule": "gpipe"}, {"accumulate_grad_batches": 2}, {"callback": Penalty}]


def _last_steps(ways: list[dict[str, Any]]) -> list[list[str]]:
    """The events of the last step of each way."""
    found = []
    for way in ways:
        EVENTS.clear()
        own = {"callback": Buckets, "accumulate_grad_batches": 1}
        given = {name: way.get(name, value) for name, value in own.items()}
        options = {name: value for name, value in way.items() if name not in own}
        strategy = DDPModelParallelStrategy(num_microbatches=3, bucket_cap_mb=1e-6, timeout_s=60, **options)
        callbacks, accumulated = [given["callback"]()], given["accumulate_grad_batches"]
        trainer = quiet_trainer(strategy, 4, callbacks=callbacks, max_steps=4, accumulate_grad_batches=accumulated)
        trainer.fit(Halves(), DataLoader(Numbered(36), 3))
        found.append(" ".join(EVENTS).split("step")[-1].split())
    return found


@pytest.mark.parametrize("ways", [WAYS, pytest.param(MORE_WAYS, marks=pytest.mark.slow)])
def test_a_stage_is_reduced_before_the_last_micro_batch_has_been_backward(ways: Any) -> None:
    last = {f"stages.1.{layer}.{kind}" for layer in ("first", "second") for kind in ("weight", "bias")}
    first = {name.replace("1", "0", 1) for name in last}
    for found in run_ranks(_last_steps, 2, ways, timeout_s=120):
        for events in found:
            buckets = [event for event in events if event != "backward"]
            assert sorted(buckets) == sorted(first | last)  # each once
            ended = len(events) - 1 - events[::-1].index("backward")  # the last pass between the layers of stage 0
            assert last <= set(events[:ended]), events
            assert "stages.0.first.weight" in events[ended:]


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
    "float32": Case(TokenNet, num=11, batch_size=5, dtype=torch.float32, tolerance=1e-5),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "views": {"gradient_as_bucket_view": True},
    "uneven": {"weights": [3, 1]},
    "optimizer shards": {"shard_optimizer": True},
}
FEW = [(case, "1f1b") for case in CASES if case not in ("ragged", "tied", "float32")]
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
        one, tolerance = baseline(CASES[case]), CASES[case].tolerance
        torch.testing.assert_close(weights, one.weights, rtol=0, atol=tolerance, msg=f"{case}, {way}")
        torch.testing.assert_close(gradients, one.gradients, rtol=0, atol=tolerance, msg=f"{case}, {way}")
        assert (weights == second[case, way][0]).all(), f"{case}, {way}: ranks have gone apart"
