"""A run goes on with another number of ranks, or another strategy, as if it had not been interrupted."""

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from distributed import RankError, run_ranks, run_script
from tiny import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.wrappers import Running

from evener.strategies import (
    BalancedDDPStrategy,
    DataParallelStrategy,
    DDPModelParallelStrategy,
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.trainer.checkpoint import Checkpoint

NUM_SAMPLES, GLOBAL_BATCH, NUM_EPOCHS = 57, 18, 3
BATCHES_PER_EPOCH = 4  # the last one has 3 samples: fewer than 7 ranks

STRATEGIES: dict[str, Callable[[int], Any]] = {
    "single_device": lambda num: SingleDeviceStrategy(),
    "dp": lambda num: DataParallelStrategy(),
    "model_parallel": lambda num: ModelParallelStrategy(),
    "ddp": lambda num: DDPStrategy(batch_size_is="global", timeout_s=120),
    "ddp_per_device": lambda num: DDPStrategy(timeout_s=120),
    "balanced_ddp": lambda num: BalancedDDPStrategy(weights=[1.0 + i % 3 for i in range(num)], timeout_s=120),
    "ddp_model_parallel": lambda num: DDPModelParallelStrategy(batch_size_is="global", timeout_s=120),
}
DEVICES = {"dp": 2, "model_parallel": 2}
IN_ONE_PROCESS = ("single_device", "dp", "model_parallel")


class Numbered(Dataset[Any]):
    """Fixed samples that know their number, with noise from all three libraries in data workers."""

    def __init__(self) -> None:
        self.x = torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = 0.0
        if get_worker_info() is not None:
            noise = random.random() + np.random.rand() + float(torch.rand((), dtype=torch.float64))
        return self.x[index] + noise, index


class Streamed(IterableDataset[Any]):
    """The samples in an order that is drawn, of no known length; with a worker it is the worker that draws."""

    def __iter__(self) -> Iterator[Any]:
        data = Numbered()
        for index in torch.randperm(NUM_SAMPLES).tolist():
            yield data[index]


class DrawsAnew(Sampler[int]):
    """Draws each index from the global random stream when it is asked for."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        rest = list(range(NUM_SAMPLES))
        while rest:
            yield rest.pop(int(torch.randint(len(rest), ())))


@dataclass(frozen=True)
class Case:
    """A way to train; the trainer's options are those of every leg."""

    order: str = "shuffle"
    num_workers: int = 0
    trainer: dict[str, Any] = field(default_factory=dict)
    given_size: bool = False
    window: bool = False

    def loader(self) -> DataLoader[Any]:
        data: Any = Streamed() if self.order == "stream" else Numbered()
        context = {"multiprocessing_context": "fork"} if self.num_workers else {}
        order = {"sampler": DrawsAnew()} if self.order == "draws_anew" else {"shuffle": self.order == "shuffle"}
        return DataLoader(data, GLOBAL_BATCH, num_workers=self.num_workers, **order, **context)


class Recorded(pl.LightningModule):
    """Remembers the samples of every batch, and collects epoch metrics of several kinds."""

    def __init__(self, case: Case, cut: tuple[int, int] | None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.mean = MeanMetric().set_dtype(torch.float64)
        self.order = CatMetric()
        self.window = Running(MeanMetric(), 3) if case.window else None
        self.case = case
        self.cut = cut
        self.seen: dict[tuple[int, int], list[int]] = {}
        self.logged: dict[tuple[int, str], float] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) == self.cut:
            raise KeyboardInterrupt
        shares = getattr(getattr(self.trainer.strategy, "contract", None), "shares", None)
        if shares is None or shares.counts:
            self.seen[self.current_epoch, batch_idx] = batch[1].tolist()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, ids = batch
        loss = (self.net(x) - ids[:, None] / 10).square().mean()
        self.mean.update(loss.detach(), len(ids))
        self.order.update(ids)
        if self.window is not None:
            self.window.update(loss.detach())
        size = {"batch_size": GLOBAL_BATCH} if self.case.given_size else {}
        self.log("loss", loss, on_step=False, on_epoch=True, **size)
        self.log("largest", ids.max().double(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("number", float(len(ids)), on_step=False, on_epoch=True, reduce_fx="sum")
        if batch_idx == 0:
            self.log("early", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        order = self.order.compute().sort().values  # ranks join in their own order
        self.log("mean", self.mean.compute())
        self.log("order", (order * torch.arange(1, 1 + len(order))).sum())
        self.mean.reset()
        self.order.reset()

    def on_train_epoch_start(self) -> None:
        self._keep(self.current_epoch - 1)

    def on_train_end(self) -> None:
        self._keep(self.current_epoch - 1)

    def _keep(self, epoch: int) -> None:
        self.logged |= {(epoch, name): float(value) for name, value in self.trainer.callback_metrics.items()}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def train(folder: Path, case: Case, strategy: str, num_ranks: int, cut: tuple[int, int] | None) -> tuple[Any, ...]:
    """Train from `last.ckpt`, if there is one, up to a batch, or to the end.

    Returns:
        The samples by epoch and batch, what was logged, the weights, and the warnings.
    """
    torch.set_num_threads(1)
    pl.seed_everything(3, verbose=False)
    module = Recorded(case, cut)
    last = folder / "last.ckpt"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = quiet(
            strategy=STRATEGIES[strategy](num_ranks), devices=_num_devices(strategy, num_ranks), max_epochs=NUM_EPOCHS,
            callbacks=[Checkpoint(folder, interval_s=0.0)], **case.trainer,
        )  # fmt: skip
        try:
            trainer.fit(module, case.loader(), ckpt_path=str(last) if last.exists() else None)
        except (KeyboardInterrupt, SystemExit):
            assert cut is not None
    weights = {name: value.detach().cpu().clone() for name, value in module.net.state_dict().items()}
    return module.seen, module.logged, weights, [str(one.message) for one in told]


def _num_devices(strategy: str, num_ranks: int) -> int:
    return DEVICES.get(strategy, 2 * num_ranks if strategy == "ddp_model_parallel" else num_ranks)


def leg(folder: Path, case: Case, strategy: str, num_ranks: int, cut: tuple[int, int] | None) -> list[Any]:
    """Train on ranks up to a batch; return what each of them returned."""
    args = (folder, case, strategy, num_ranks, cut)
    if strategy in IN_ONE_PROCESS:
        return [run_script(train, *args)]
    return run_ranks(train, num_ranks, *args, timeout_s=200)


def prove(folder: Path, case: Case, legs: list[tuple[str, int]], cuts: list[tuple[int, int]]) -> None:
    """Train in legs, each on other ranks, and compare all with one device that was left alone."""
    (whole := folder / "whole").mkdir()
    ((seen, logged, weights, _),) = leg(whole, case, "single_device", 1, None)
    assert len(seen) == NUM_EPOCHS * BATCHES_PER_EPOCH
    (parts := folder / "parts").mkdir()
    found: dict[tuple[int, int], list[int]] = {}
    values: dict[tuple[int, str], float] = {}
    for (strategy, num_ranks), cut in zip(legs, [*cuts, None], strict=True):
        ranks = leg(parts, case, strategy, num_ranks, cut)
        part: dict[tuple[int, int], list[int]] = {}
        for rank in ranks:
            for place, ids in rank[0].items():
                part[place] = part.get(place, []) + ids
        assert not found.keys() & part.keys(), "trained twice"
        found |= part
        values |= {key: value for key, value in ranks[0][1].items() if key[0] >= 0}
        weights_now = [rank[2] for rank in ranks]
        assert not [text for text in ranks[0][3] if "was written by" in text]
    assert found == seen
    for rank in weights_now:
        for name, expected in weights.items():
            torch.testing.assert_close(rank[name], expected, rtol=0, atol=1e-10)
    expected_values = {key: value for key, value in logged.items() if key[0] >= 0}
    for key, value in expected_values.items():
        assert values[key] == pytest.approx(value, rel=2e-6), key  # logged in float32


SHORT = {
    "shuffled": (Case(), [("single_device", 1), ("ddp", 3), ("dp", 1), ("balanced_ddp", 7), ("ddp", 2)]),
    "workers": (Case(num_workers=2), [("ddp", 2), ("single_device", 1), ("ddp", 3)]),
    "accumulation": (
        Case(trainer={"accumulate_grad_batches": 3, "exact_accumulation": True}),
        [("ddp", 3), ("single_device", 1), ("ddp", 2), ("model_parallel", 1)],
    ),
    "stages": (
        Case(),
        [("ddp_model_parallel", 2), ("dp", 1), ("ddp_model_parallel", 3), ("single_device", 1), ("ddp", 2)],
    ),
    "an order that is drawn anew": (Case("draws_anew"), [("single_device", 1), ("ddp", 2), ("single_device", 1)]),
    "a given batch size": (Case(given_size=True), [("ddp", 7), ("single_device", 1), ("ddp", 3), ("ddp", 2)]),
    "a stream, with a worker": (Case("stream", 1), [("ddp", 2), ("ddp", 3)]),
}
CUTS = [(0, 2), (1, 1), (1, 3), (2, 2)]


@pytest.mark.long
@pytest.mark.parametrize("name", SHORT)
def test_a_run_goes_on_exactly_on_other_ranks(name: str, tmp_path: Path) -> None:
    case, legs = SHORT[name]
    prove(tmp_path, case, legs, CUTS[: len(legs) - 1])


@pytest.mark.long
def test_ranks_with_batches_of_their_own_are_told_once_that_the_rest_is_not_exact(tmp_path: Path) -> None:
    leg(tmp_path, Case(), "ddp_per_device", 2, (0, 1))
    told = [rank[3] for rank in leg(tmp_path, Case(), "ddp_per_device", 1, (1, 0))]
    (text,) = [text for text in told[0] if "was written by" in text]
    assert text.startswith("The checkpoint was written by 2 ranks and is resumed by one process")
    assert text.endswith("give the global batch as the loader's batch size, and set strategy.batch_size_is=global.")


@pytest.mark.long
def test_a_metric_that_cant_be_carried_over_is_refused_by_name(tmp_path: Path) -> None:
    case = Case(window=True)
    leg(tmp_path, case, "ddp", 2, (0, 2))
    with pytest.raises(RankError, match=r"what Running \(window\) has collected since can't be carried over"):
        leg(tmp_path, case, "single_device", 1, None)
