"""Metrics of torchmetrics under ranks: states of unequal length, the order of samples, running windows."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torchmetrics
from distributed import run_ranks
from regression import Net, Numbered, quiet_trainer, refusal, weights
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.text import ROUGEScore
from torchmetrics.wrappers import Running

from evener.strategies import BalancedDDPStrategy, DDPStrategy, SingleDeviceStrategy
from evener.strategies.core.errors import ConfigError
from evener.strategies.distributed.metrics.sync import RunMetrics
from evener.strategies.distributed.store import RankError

STRATEGIES: dict[str, Any] = {
    "global": lambda: DDPStrategy(batch_size_is="global", timeout_s=120),
    "weights": lambda: BalancedDDPStrategy(weights=[1, 3], timeout_s=120),
}


class PerSample(torchmetrics.Metric):
    """Keeps a list with one tensor of its own length per sample, as detection metrics keep their boxes."""

    boxes: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("boxes", [], dist_reduce_fx=None)
        self.add_state("names", [], dist_reduce_fx=None)

    def update(self, index: Tensor) -> None:
        self.boxes += [torch.full((int(i) % 3,), int(i)) for i in index]
        self.names += [(f"n{int(i)}",) for i in index]

    def compute(self) -> Tensor:
        flat = torch.cat(self.boxes).double()
        named = sum((i + 1) * int(name[0][1:]) for i, name in enumerate(self.names))
        return (flat * torch.arange(1, len(flat) + 1)).sum() + named


class Measured(Net):
    """Feeds metrics whose values depend on every sample, on their order or on the last batches."""

    def __init__(self) -> None:
        super().__init__()
        self.rouge = ROUGEScore(rouge_keys="rouge1")
        self.boxes = PerSample()
        self.order = torchmetrics.CatMetric()
        self.window = Running(torchmetrics.SumMetric(), 2)
        self.never_reset = torchmetrics.MeanAbsoluteError().set_dtype(torch.float64)
        self.train_order = torchmetrics.CatMetric()
        self.train_window = Running(torchmetrics.MeanMetric(), 2)
        self.found: dict[str, Any] = {"never reset": []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.train_order.update(batch[2])
        self.train_window.update(batch[2])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        said = [" ".join(["a"] * (int(i) % 4 + 1)) for i in batch[2]]
        self.never_reset.update(self.net(batch[0]), batch[1])
        self.rouge.update(said, ["a a b"] * len(said))
        self.boxes.update(batch[2])
        self.order.update(batch[2])
        self.window.update(batch[2].double())

    def on_validation_epoch_end(self) -> None:
        self.found["rouge"] = self.rouge.compute()["rouge1_fmeasure"].item()
        self.found["boxes"] = self.boxes.compute().item()
        self.found["order"] = self.order.compute().flatten().tolist()
        self.found["window"] = self.window.compute().item()
        # a rank without another sample returned the last value at once, and the others met what it exchanged next
        self.found["never reset"].append(self.never_reset.compute().item())
        for metric in (self.rouge, self.boxes, self.order, self.window):
            metric.reset()

    def on_train_epoch_end(self) -> None:
        self.found["train_order"] = self.train_order.compute().tolist()
        self.found["train_window"] = self.train_window.compute().item()


def _fit(strategy: str | None, num: int) -> dict[str, Any]:
    module = Measured()
    chosen = STRATEGIES[strategy]() if strategy else SingleDeviceStrategy()
    trainer = quiet_trainer(chosen, 2 if strategy else 1, max_epochs=1, num_sanity_val_steps=1)
    loader = DataLoader(Numbered(num), 4)
    trainer.fit(module, loader, loader)
    return module.found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num", [11, 9, 1])
def test_metrics_equal_one_device_on_ranks_with_unequal_samples(strategy: str, num: int) -> None:
    # 11 in batches of 4: 2 + 2, 2 + 2, 2 + 1; with 9 a rank has nothing in the last batch, with 1 in none
    single = _fit(None, num)
    assert single["order"] == list(range(num))
    for rank in run_ranks(_fit, 2, strategy, num):
        torch.testing.assert_close(rank, single, rtol=0, atol=1e-10)


class Tuples(torchmetrics.Metric):
    """Exchanges its lists of tuples itself, as torchmetrics' MeanAveragePrecision does with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("masks", [], dist_reduce_fx=None)

    def update(self, index: int) -> None:
        self.masks.append((index, b"mask"))

    def compute(self) -> Tensor:
        return torch.tensor([index for index, _ in self.masks])

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        super()._sync_dist(dist_sync_fn, process_group)
        self.masks = self._gather_tuple_list(self.masks)

    @staticmethod
    def _gather_tuple_list(masks: list[Any]) -> list[Any]:
        ranks: list[Any] = [None, None]
        torch.distributed.all_gather_object(ranks, masks)
        return [ranks[rank][i] for i in range(len(ranks[0])) for rank in range(2)]


class BatchMean(torchmetrics.Metric):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, value: float) -> None:
        self.mean = torch.tensor(value)

    def compute(self) -> Tensor:
        return self.mean


def _exchange() -> dict[str, Any]:
    torch.distributed.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=20))
    rank = torch.distributed.get_rank()
    metrics = RunMetrics()
    metrics.begin(False, lambda: (1.0, False, ""))
    found: dict[str, Any] = {}
    tuples = Tuples()
    for index in ([0, 1, 2], [3])[rank]:
        tuples.update(index)
    found["tuples"] = tuples.compute().tolist()
    equal, unequal = BatchMean(), BatchMean()
    equal.update(2.0)
    found["equal"] = equal.compute().item()
    unequal.update(2.0 + rank)
    for name, metric in (("unequal", unequal), ("others", [torchmetrics.SumMetric(), torchmetrics.MaxMetric()][rank])):
        try:
            metric.update(1.0 + rank)
            metric.compute()
        except (ConfigError, RankError) as exc:
            found[name] = str(exc)
    metrics.end()
    total = torchmetrics.SumMetric()
    total.update(1.0 + rank)
    found["after"] = (total.compute().item(), "_sync_dist" in vars(Running), Tuples._sync_dist.__module__ == __name__)
    torch.distributed.destroy_process_group()
    return found


def test_states_that_are_not_sums() -> None:
    for rank in run_ranks(_exchange, 2):
        assert rank["tuples"] == [0, 1, 2, 3]
        assert rank["equal"] == 2
        assert "BatchMean: its state 'mean' is reduced by a plain mean over ranks" in rank["unequal"]
        assert "rank 0 computes the metric SumMetric over all ranks, but rank 1 computes MaxMetric" in rank["others"]
        assert rank["after"] == (3, False, True)


def _correlations(num_outputs: int) -> list[Tensor]:
    """Pearson's and the concordance coefficient of four samples, of which each rank has two with one target."""
    rank = int(os.environ["RANK"])
    x = torch.tensor([1.0, 2.0, 4.0, 3.0], dtype=torch.float64)[2 * rank : 2 * rank + 2]
    y = torch.full((2,), float(rank), dtype=torch.float64)
    if num_outputs > 1:
        x, y = x[:, None].repeat(1, num_outputs), y[:, None].repeat(1, num_outputs)
    torch.distributed.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=20))
    run = RunMetrics()
    run.begin(False, lambda: (1.0, False, ""))
    try:
        metrics = [cls(num_outputs) for cls in (torchmetrics.PearsonCorrCoef, torchmetrics.ConcordanceCorrCoef)]
        for metric in metrics:
            metric.set_dtype(torch.float64).update(x, y)
        return [metric.compute() for metric in metrics]
    finally:
        run.end()
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_correlations_of_ranks_with_equal_targets_are_one_devices(num_outputs: int) -> None:
    """torchmetrics divides by the largest deviation from the rank's own mean, which is 0 on both ranks: NaN."""
    # x - mean = -1.5, -0.5, 1.5, 0.5; y - mean = -0.5, -0.5, 0.5, 0.5: covariance 2/3, variances 5/3 and 1/3
    pearson = 2 / 5**0.5
    concordance = 2 * (2 / 3) / (5 / 3 + 1 / 3 + 4)
    for found in run_ranks(_correlations, 2, num_outputs):
        for value, expected in zip(found, (pearson, concordance), strict=True):
            torch.testing.assert_close(value.double(), torch.full_like(value, expected).double(), rtol=0, atol=1e-6)


class SyncedError(Net):
    """Logs the error of all ranks' samples, or trains with it."""

    def __init__(self, is_loss: bool) -> None:
        super().__init__()
        self.is_loss = is_loss
        self.mse = torchmetrics.MeanSquaredError(dist_sync_on_step=True).set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        error = self.mse(self.net(batch[0]), batch[1])
        return error if self.is_loss else loss


def _fit_synced(is_loss: bool, num_ranks: int) -> tuple[Tensor, str, int]:
    module = SyncedError(is_loss)
    strategy = DDPStrategy(batch_size_is="global", timeout_s=120) if num_ranks > 1 else SingleDeviceStrategy()
    trainer = quiet_trainer(strategy, num_ranks, max_epochs=1)
    refused = refusal(trainer, module, DataLoader(Numbered(9), 4))
    return weights(module), refused, trainer.global_step


def test_a_loss_of_all_ranks_samples_is_refused() -> None:
    # nequip's loss is such a metric. Each rank has the gradient of its own samples within the mean of all, which
    # weighting by samples made too small by the number of ranks; where the batch is uneven also wrong in direction.
    for _, refused, num_steps in run_ranks(_fit_synced, 2, True, 2):
        assert num_steps == 0
        assert "MeanSquaredError has the samples of all ranks (dist_sync_on_step=True)" in refused


def test_a_synchronized_metric_that_is_no_loss_may_have_gradients() -> None:
    expected, _, num_steps = _fit_synced(False, 1)
    for found, refused, num in run_ranks(_fit_synced, 2, False, 2):
        assert (refused, num) == ("", num_steps)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class Asks(Net):
    """Asks its metrics for values within steps, and once more at the end of the epoch."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.error = torchmetrics.MeanAbsoluteError().set_dtype(torch.float64)
        self.order = torchmetrics.CatMetric()
        self.window = Running(torchmetrics.MeanMetric().set_dtype(torch.float64), 2)
        self.in_step = torchmetrics.MeanAbsoluteError(dist_sync_on_step=True).set_dtype(torch.float64)
        self.values: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, index = batch
        self.error.update(self.net(x), y)
        self.order.update(index)
        self.window.update(index.double())
        self.log("in_step", self.in_step(self.net(x), y))
        if batch_idx == 1 or self.when == "each":
            for name in ("error", "order", "window"):
                value = getattr(self, name).compute()
                self.log(f"{name}_{batch_idx}", value.double().sum(), batch_size=1)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.values.append([metric.compute().tolist() for metric in (self.error, self.order, self.window)])


def _ask(strategy: str | None, when: str) -> tuple[list[Any], dict[str, float]]:
    module = Asks(when)
    chosen = STRATEGIES[strategy]() if strategy else SingleDeviceStrategy()
    trainer = quiet_trainer(chosen, 2 if strategy else 1, max_epochs=1)
    trainer.fit(module, DataLoader(Numbered(9), 4))
    names = [name for name in trainer.callback_metrics if name != "in_step"]
    return module.values, {name: trainer.callback_metrics[name].item() for name in names}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("when", ["each", "once"])
def test_compute_in_a_step_does_not_count_the_sample_of_a_rank_without_one(strategy: str, when: str) -> None:
    """The rank's stand-in was counted; computed before that step, the metric met no other rank afterwards."""
    # of 9 samples in batches of 4 the last batch has one
    single = _ask(None, when)
    for rank in run_ranks(_ask, 2, strategy, when):
        torch.testing.assert_close(rank, single, rtol=0, atol=1e-10)
