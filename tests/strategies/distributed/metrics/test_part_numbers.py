"""Aggregators that are given one number per batch, of which each rank has a part: the idiom `self.train_loss(loss)`."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics as tm
from distributed import run_ranks, run_ranks_unchecked
from regression import Net, Numbered, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.strategies import (
    BalancedDDPStrategy,
    DDPModelParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
)

STRATEGIES: dict[str, Any] = {
    "global": lambda: DDPStrategy(batch_size_is="global", timeout_s=120),
    "weights": lambda: BalancedDDPStrategy(weights=[1, 3], timeout_s=120),
}


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
    """Gives numbers of a batch to aggregators, in every way that is one device's."""

    def __init__(self, squeezes: bool) -> None:
        super().__init__()
        self.squeezes = squeezes
        made: dict[str, Any] = {
            "trained": tm.MeanMetric(), "validated": tm.MeanMetric(), "window": tm.RunningMean(2),
            "unchecked": tm.MeanMetric(nan_strategy="disable"), "weighted": tm.MeanMetric(),
            "samples": tm.MeanMetric(), "squeezed": tm.MeanMetric(), "count": tm.SumMetric(), "host": tm.MeanMetric(),
            "epochs": tm.MaxMetric(),
        }  # fmt: skip
        self.of = nn.ModuleDict(made)
        self.pair = tm.MetricCollection([tm.MeanMetric()], prefix="pair_")
        self.found: list[dict[str, float]] = []
        self.within: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, _ = batch
        loss, of = ((self.net(x) - y) ** 2).mean(), self.of
        of["trained"](loss)
        self.log("train", of["trained"], on_step=True, on_epoch=True, sync_dist=True)
        if batch_idx == 1:
            self.within.append(of["trained"].compute().item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y, _ = batch
        each = ((self.net(x) - y) ** 2).squeeze(1)
        error, of = each.mean(), self.of
        of["validated"].update(value=error)
        of["window"].update(error)
        of["unchecked"].update(error)
        of["weighted"].update(error, weight=len(x))
        of["samples"].update(each)
        if self.squeezes:
            of["squeezed"].update(each.squeeze())
        of["count"].update((each > 0.5).sum())
        of["host"].update(error.item())
        self.pair(error)
        self.log_dict(self.pair)
        self.log("val", of["validated"])
        return {"error": error}

    def on_validation_epoch_end(self) -> None:
        self.of["epochs"].update(self.of["weighted"].compute())
        skipped = ("trained", "validated", *([] if self.squeezes else ["squeezed"]))
        self.found.append({name: m.compute().item() for name, m in self.of.items() if name not in skipped})
        for name, metric in self.of.items():
            if name not in ("trained", "validated", "epochs"):
                metric.reset()


def _fit(strategy: str | None, num: int, num_ranks: int, squeezes: bool = True) -> dict[str, Any]:
    module, callback = Aggregates(squeezes), OfCallback()
    chosen = STRATEGIES[strategy]() if strategy else SingleDeviceStrategy()
    trainer = quiet_trainer(chosen, num_ranks, num_sanity_val_steps=0, callbacks=[callback])
    trainer.fit(module, DataLoader(Numbered(num), 4), DataLoader(Numbered(num), 4))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"found": module.found, "within": module.within, "callback": callback.found, "logged": logged}


# of 9 in batches of 4 the last batch has one sample, of 11 three
@pytest.mark.parametrize(
    ("strategy", "num", "num_ranks"),
    [("global", 9, 2), ("weights", 9, 2), ("weights", 11, 2), ("global", 9, 3)],
)
def test_a_number_per_batch_counts_by_the_samples_of_its_rank(strategy: str, num: int, num_ranks: int) -> None:
    squeezes = num_ranks == 2  # each rank has two samples at first
    single = _fit(None, num, 1, squeezes)
    assert len(single["found"]) == 2
    assert {"train_step", "train_epoch", "val", "pair_MeanMetric"} <= set(single["logged"])
    for rank in run_ranks(_fit, num_ranks, strategy, num, num_ranks, squeezes):
        torch.testing.assert_close(rank, single, rtol=0, atol=1e-6)  # aggregators round what they get to float32


def test_a_number_that_may_be_the_value_of_one_sample_is_refused() -> None:
    for rank in run_ranks_unchecked(_fit, 3, "global", 8, 3):  # 2, 1 and 1 of 4 samples
        assert "MeanMetric was given one value per sample on a rank, but a number on another" in str(rank)


class CountsEach(Net):
    """Gives numbers to metrics in steps that a rank may run in chunks or micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.window, self.val = tm.MeanMetric(), tm.RunningMean(2), tm.MeanMetric()
        self.found: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = ((self.net(batch[0]) - batch[1]) ** 2).mean()
        self.mean(loss.detach())
        self.window.update(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val.update(((self.net(batch[0]) - batch[1]) ** 2).mean())

    def on_train_epoch_end(self) -> None:
        self.found += [metric.compute().item() for metric in (self.mean, self.window, self.val)]


GRID: dict[str, Any] = {
    "single": lambda: (SingleDeviceStrategy(), 1),
    "replicas": lambda: (DDPStrategy(batch_size_is="global", devices_per_process=2, timeout_s=120), 4),
    "stages": lambda: (DDPModelParallelStrategy(batch_size_is="global", num_microbatches=2, timeout_s=120), 4),
    "shards": lambda: (FSDPStrategy(batch_size_is="global", timeout_s=120), 2),
}


def _fit_grid(name: str) -> list[float]:
    strategy, devices = GRID[name]()
    module, loader = CountsEach(), DataLoader(Numbered(11), 4)
    quiet_trainer(strategy, devices, max_epochs=1, num_sanity_val_steps=0).fit(module, loader, loader)
    return module.found


@pytest.mark.parametrize("name", ["replicas", "stages", "shards"])
def test_a_number_of_several_devices_of_a_rank_counts_once(name: str) -> None:
    """A part's weight was applied twice where the call of the metric is replaced for chunks, too."""
    for rank in run_ranks(_fit_grid, 2, name):
        assert rank == pytest.approx(_fit_grid("single"), abs=1e-6)


class GivenByHooks(Net):
    """Gives what is one device's on every rank to aggregators, in hooks of batches and of epochs."""

    def __init__(self) -> None:
        super().__init__()
        made: dict[str, Any] = {
            "largest": tm.MaxMetric(), "smallest": tm.MinMetric(), "norms": tm.CatMetric(), "total": tm.SumMetric(),
            "mean": tm.MeanMetric(), "epochs": tm.SumMetric(), "losses": tm.CatMetric(), "of_epochs": tm.MeanMetric(),
        }  # fmt: skip
        self.of, self.trained = nn.ModuleDict(made), tm.MeanMetric()
        self.found: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = ((self.net(batch[0]) - batch[1]) ** 2).mean()
        self.trained(loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        for name in ("largest", "smallest", "norms", "total", "mean"):
            self.of[name].update(norm)

    def on_train_epoch_end(self) -> None:
        loss = self.trained.compute()
        self.trained.reset()
        self.of["epochs"].update(1.5)
        self.of["losses"].update(loss)
        self.of["of_epochs"].update(loss.item())
        self.found.append({name: metric.compute() for name, metric in self.of.items()})


def _given_by_hooks(strategy: str | None, devices: int) -> list[dict[str, Any]]:
    module = GivenByHooks()
    trainer = quiet_trainer(STRATEGIES[strategy]() if strategy else SingleDeviceStrategy(), devices)
    trainer.fit(module, DataLoader(Numbered(9), 4))
    return module.found


@pytest.mark.parametrize("strategy", ["global", "weights"])
def test_what_hooks_give_on_all_ranks_alike_counts_once(strategy: str) -> None:
    # SumMetric and CatMetric counted it once per rank, and MaxMetric refused the norm of a gradient.
    expected = _given_by_hooks(None, 1)
    assert [len(found["norms"]) for found in expected] == [3, 6]
    assert [float(found["epochs"]) for found in expected] == [1.5, 3.0]
    for found in run_ranks(_given_by_hooks, 2, strategy, 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class GivesItsOwn(Net):
    """Gives an aggregator what a rank has computed of its samples, or what may be that: in steps or in a hook."""

    def __init__(self, name: str, in_steps: bool) -> None:
        super().__init__()
        self.name, self.in_steps = name, in_steps
        made = getattr(tm, name.partition(" ")[0])
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
        self.metric.update(len(self.losses) if "count" in self.name else sum(self.losses))
        self.metric.compute()


def _fit_own(name: str, in_steps: bool) -> None:
    loader = DataLoader(Numbered(8), 4)
    quiet_trainer(STRATEGIES["global"](), 2).fit(GivesItsOwn(name, in_steps), loader, loader)


@pytest.mark.parametrize("name", ["MaxMetric", "MinMetric", "SumMetric", "CatMetric", "RunningSum"])
def test_numbers_of_parts_from_which_the_batchs_is_not_known_are_refused_before_training(name: str) -> None:
    said = "SumMetric" if name == "RunningSum" else name
    for rank in run_ranks_unchecked(_fit_own, 2, name, True):
        assert f"{said} was given one number for the samples that this rank has of a batch" in str(rank)
        assert "_run_sanity_check" in str(rank)


@pytest.mark.parametrize("name", ["MeanMetric", "MaxMetric", "SumMetric", "CatMetric", "SumMetric of a count"])
def test_what_hooks_give_of_a_ranks_own_samples_is_refused(name: str) -> None:
    told = "ranks have the same whole numbers" if "count" in name else "ranks have different numbers"
    for rank in run_ranks_unchecked(_fit_own, 2, name, False):
        assert f"{name.partition(' ')[0]} was given numbers by a hook, outside of a step, and {told}" in str(rank)
