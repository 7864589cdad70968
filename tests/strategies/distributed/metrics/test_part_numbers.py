"""Aggregators that are given one number per batch, of which each rank has a part: the idiom `self.train_loss(loss)`."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics as tm
from distributed import run_ranks_unchecked
from regression import Net, Numbered, assert_as_single, trainer_of
from torch import Tensor, nn
from torch.utils.data import DataLoader


class OfCallback(pl.Callback):
    """Keeps a metric that is no part of the module, and updates it between two steps."""

    def __init__(self) -> None:
        self.mean = tm.MeanMetric()
        self.found = 0.0

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.mean.update(outputs["error"])

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.found = self.mean.compute().item()
        self.mean.reset()


class Aggregates(Net):
    """Gives numbers to aggregators: in steps those of a batch, in every way, and in hooks what is one device's."""

    def __init__(self, in_parts: bool, has_windows: bool) -> None:
        super().__init__()
        self.in_parts = in_parts
        means = ("trained", "validated", "weighted", "samples", "squeezed", "host", "norm", "of_epochs")
        sums = ("count", "norms", "epochs")
        made: dict[str, Any] = {
            **{name: tm.MeanMetric() for name in means}, **{name: tm.SumMetric() for name in sums},
            **{name: tm.RunningMean(2) for name in ("window", "train_window")[: 2 * has_windows]},
            "unchecked": tm.MeanMetric(nan_strategy="disable"), "largest": tm.MaxMetric(), "smallest": tm.MinMetric(),
            "each": tm.CatMetric(), "losses": tm.CatMetric(),
        }  # fmt: skip
        self.of = nn.ModuleDict(made)
        self.pair = tm.MetricCollection([tm.MeanMetric()], prefix="pair_")
        self.found: list[dict[str, Any]] = []
        self.within: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = ((self.net(batch[0]) - batch[1]) ** 2).mean()
        self.of["trained"](loss)
        if "train_window" in self.of:
            self.of["train_window"].update(loss.detach())
        self.log("train", self.of["trained"], on_step=True, on_epoch=True, sync_dist=True)
        if batch_idx == 1 and not self.in_parts:
            self.within.append(self.of["trained"].compute().item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        for name in ("largest", "smallest", "each", "norms", "norm"):
            self.of[name].update(norm)

    def on_train_epoch_end(self) -> None:
        loss = self.of["trained"].compute()
        self.of["epochs"].update(1.5)
        self.of["losses"].update(loss)
        self.of["of_epochs"].update(loss.item())
        # what is logged as an object was reset with the validation
        self.found.append({name: metric.compute() for name, metric in self.of.items() if name != "validated"})

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y, _ = batch
        each = ((self.net(x) - y) ** 2).squeeze(1)
        error, of = each.mean(), self.of
        of["validated"].update(value=error)
        if "window" in of:
            of["window"].update(error)
        of["unchecked"].update(error)
        of["weighted"].update(error, weight=len(x))
        of["samples"].update(each)
        of["squeezed"].update(each.squeeze())
        of["count"].update((each > 0.5).sum())
        of["host"].update(error.item())
        self.pair(error)
        self.log_dict(self.pair)
        self.log("val", of["validated"])
        return {"error": error}


def _fit(strategy: str, num: int, in_parts: bool, devices: dict[str, int]) -> dict[str, Any]:
    module, callback = Aggregates(in_parts, has_windows=num != 9), OfCallback()
    trainer = trainer_of(strategy, num_sanity_val_steps=0, callbacks=[callback], **devices)
    trainer.fit(module, DataLoader(Numbered(num), 4), DataLoader(Numbered(num), 4))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"found": module.found, "within": module.within, "callback": callback.found, "logged": logged}


@pytest.mark.parametrize(
    ("strategy", "num"),  # of 9 in batches of 4 the last batch has one sample, of 11 three
    [("ddp", 9), ("weights", 11), ("replicas", 11), ("stages", 11), ("shards", 11)],
)
def test_a_number_per_batch_counts_once_by_the_samples_of_its_rank(strategy: str, num: int) -> None:
    # SumMetric and CatMetric counted what hooks gave once per rank, and MaxMetric refused the norm of a gradient. A
    # part's weight was applied twice where the call of the metric is replaced for chunks, too.
    # A single sample's squeezed value was taken for that of its part. There a value within a step needs whole batches.
    in_parts = strategy in ("replicas", "stages")
    single = assert_as_single(_fit, strategy, num, in_parts, {}, tolerance=1e-5)  # aggregators round to float32
    assert [len(found["each"]) for found in single["found"]] == [3, 6]
    assert [float(found["epochs"]) for found in single["found"]] == [1.5, 3.0]
    assert {"train_step", "train_epoch", "val", "pair_MeanMetric"} <= set(single["logged"])


def test_a_number_that_may_be_the_value_of_one_sample_is_refused() -> None:
    for rank in run_ranks_unchecked(_fit, 3, "ddp", 8, False, {"devices": 3}):  # 2, 1 and 1 of 4 samples
        assert "MeanMetric was given one value per sample on a rank, but a number on another" in str(rank)


class GivesItsOwn(Net):
    """Gives an aggregator what a rank has computed of its samples, or what may be that: in steps or in a hook."""

    def __init__(self, name: str, in_steps: bool) -> None:
        super().__init__()
        self.in_steps = in_steps
        made = getattr(tm, name)
        self.metric: Any = made(3) if name == "RunningSum" else made()
        self.losses = list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = ((self.net(batch[0]) - batch[1]) ** 2).mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.in_steps:
            self.metric(self.net(batch[0]).sum())

    def on_train_epoch_end(self) -> None:
        self.metric.update(sum(self.losses))
        self.metric.compute()


def _fit_own(name: str, in_steps: bool) -> None:
    loader = DataLoader(Numbered(8), 4)
    trainer_of("ddp").fit(GivesItsOwn(name, in_steps), loader, loader)


IN_STEPS = "one number for the samples that this rank has of a batch"
IN_HOOKS = "numbers by a hook, and others in steps or on other ranks"


@pytest.mark.parametrize(
    ("name", "in_steps", "told"),
    [
        *((name, True, IN_STEPS) for name in ("MaxMetric", "CatMetric", "RunningSum")),
        *((name, False, IN_HOOKS) for name in ("MeanMetric", "SumMetric")),
    ],
)
def test_numbers_of_ranks_from_which_the_batchs_is_not_known_are_refused(name: str, in_steps: bool, told: str) -> None:
    said = "SumMetric" if name == "RunningSum" else name
    for rank in run_ranks_unchecked(_fit_own, 2, name, in_steps):
        assert f"{said} was given {told}" in str(rank)
        assert not in_steps or "_run_sanity_check" in str(rank), "before training"
