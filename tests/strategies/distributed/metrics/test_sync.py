"""Metrics of torchmetrics under ranks: states of unequal length, running windows, step values."""

from typing import Any

import pytest
import torch
import torchmetrics
from distributed import run_ranks, run_ranks_unchecked
from regression import Net, Numbered, Points, assert_as_single, assert_same, refusal, trainer_of, weights
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanAbsoluteError, MeanMetric, MeanSquaredError, SumMetric
from torchmetrics.wrappers import Running


def double(metric: torchmetrics.Metric) -> Any:
    return metric.set_dtype(torch.float64)


class PerSample(torchmetrics.Metric):
    """Keeps a list with one tensor of its own length per sample, as detection metrics keep their boxes.

    It has an exchange of its own, for its tuples, as torchmetrics' MeanAveragePrecision has.
    """

    boxes: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("boxes", [], dist_reduce_fx=None)
        self.add_state("names", [], dist_reduce_fx=None)

    def update(self, index: Tensor) -> None:
        self.boxes += [torch.full((int(i) % 3,), int(i)) for i in index]
        self.names += [(f"n{int(i)}",) for i in index]

    def compute(self) -> Tensor:
        pairs = zip(self.boxes, self.names, strict=True)
        return torch.stack([box.double().sum() * (1 + int(name[1:])) for box, (name,) in pairs]).sum()

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        super()._sync_dist(dist_sync_fn, process_group)
        self.names = self._gather_tuple_list(self.names)

    @staticmethod
    def _gather_tuple_list(names: list[Any]) -> list[Any]:
        ranks: list[Any] = [None, None]
        torch.distributed.all_gather_object(ranks, names)
        return [name for own in ranks for name in own]


class Measured(Net):
    """Feeds metrics whose values depend on every sample, or on the last batches, and logs them by step.

    The value of a batch is no mean of its parts' values. In the batches `asks` metrics are asked within the step.
    """

    def __init__(self, asks: tuple[int, ...], has_windows: bool) -> None:
        super().__init__()
        self.asks, self.has_windows = asks, has_windows
        self.logged = torch.nn.ModuleDict()
        for stage in ("train", "val"):
            self.logged[f"{stage}_window"] = Running(SumMetric(), 2)
            self.logged[f"{stage}_composed"] = double(MeanSquaredError(squared=False)) + double(MeanAbsoluteError())
        self.boxes, self.each, self.train_each = PerSample(), CatMetric(), CatMetric()
        self.train_window = Running(MeanMetric(), 2)
        self.never_reset, self.error = double(MeanAbsoluteError()), double(MeanAbsoluteError())
        self.in_step = double(MeanAbsoluteError(dist_sync_on_step=True))
        self.found: dict[str, Any] = {"never reset": [], "steps": []}

    def _log(self, stage: str, batch: Any) -> None:
        x, y, index = batch
        for kind, given in (("composed", (x[:, 0], y[:, 0])), ("window", (index.double(),))):
            name = f"{stage}_{kind}"
            if kind != "window" or self.has_windows:
                self.logged[name](*given)
                self.log(name, self.logged[name], on_step=True, on_epoch=True, sync_dist=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._log("train", batch)
        self.train_each.update(batch[2])
        if self.has_windows:
            self.train_window.update(batch[2])
        self.error.update(self.net(batch[0]), batch[1])
        if self.asks:
            self.log("in_step", self.in_step(self.net(batch[0]), batch[1]), sync_dist=True)
        if batch_idx in self.asks:
            for name in ("error", "train_each", "train_window")[: 2 + self.has_windows]:
                value = getattr(self, name).compute().double().sum()
                self.log(f"{name}_{batch_idx}", value, batch_size=1, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        logged = self.trainer.callback_metrics
        self.found["steps"].append({name: float(logged[name]) for name in logged if name.endswith("_step")})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log("val", batch)
        self.never_reset.update(self.net(batch[0]), batch[1])
        self.boxes.update(batch[2])
        self.each.update(batch[2])

    def on_validation_epoch_end(self) -> None:
        self.found["boxes"] = self.boxes.compute().item()
        self.found["each"] = sorted(self.each.compute().flatten().tolist())
        # a rank without another sample returned the last value at once, and the others met what it exchanged next
        self.found["never reset"].append(self.never_reset.compute().item())
        self.boxes.reset()
        self.each.reset()

    def on_train_epoch_end(self) -> None:
        self.found["train_each"] = sorted(self.train_each.compute().flatten().tolist())
        if self.has_windows:
            self.found["train_window"] = self.train_window.compute().item()
        self.found["error"] = self.error.compute().item()


def _fit(
    strategy: str, num: int, asks: tuple[int, ...], has_windows: bool = False
) -> tuple[dict[str, Any], dict[str, float], Any]:
    module, loader, logger = Measured(asks, has_windows), DataLoader(Numbered(num), 4), Points()
    options: dict[str, Any] = {"max_epochs": 1, "num_sanity_val_steps": 1, "log_every_n_steps": 1, "logger": logger}
    trainer = trainer_of(strategy, **options)
    trainer.fit(module, loader, loader)
    final = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "in_step"}
    logged = [values for _, values in logger.points if "val_composed_step" in values]
    return module.found, final, logged if trainer.is_global_zero else None


# 10 in batches of 4; with 9 a rank has nothing in the last batch, with 1 in none
@pytest.mark.parametrize(
    ("strategy", "num", "asks", "has_windows"),
    [
        ("ddp", 9, (0, 1, 2), False),  # the rank's stand-in was counted
        ("ddp", 9, (1,), False),  # computed before that step, the metric met no other rank afterwards
        ("ddp", 1, (), False),
        ("weights", 10, (0, 1, 2), True),
        ("replicas", 9, (), False),
    ],
)
def test_metrics_equal_one_device_on_ranks_with_unequal_samples(
    strategy: str, num: int, asks: tuple[int, ...], has_windows: bool
) -> None:
    found, final, logged = _fit("single", num, asks, has_windows)
    assert found["each"] == list(range(num))
    assert "train_composed_step" in found["steps"][0]
    assert logged
    for rank, values in enumerate(run_ranks(_fit, 2, strategy, num, asks, has_windows)):
        # with replicas the errors are counted in float32
        assert_same(values, (found, final, None if rank else logged), 1e-6 if strategy == "replicas" else 1e-10)


def test_windows_that_hold_other_batches_on_some_ranks_are_refused() -> None:
    for rank in run_ranks_unchecked(_fit, 2, "ddp", 9, (), True):
        assert "Running(SumMetric): its window holds other batches on some ranks" in str(rank)


class Uses(Net):
    """Logs the epoch's value only, or uses what `forward` returned."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.uses = uses
        self.r2 = double(torchmetrics.R2Score())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = self.r2(batch[0][:, 0], batch[1][:, 0])
        self.log("r2", value if self.uses else self.r2, on_step=self.uses, on_epoch=True)
        return super().training_step(batch, batch_idx)


def _fit_uses(strategy: str, uses: bool) -> float:
    trainer = trainer_of(strategy, max_epochs=1)
    trainer.fit(Uses(uses), DataLoader(Numbered(11), 4))
    return float(trainer.callback_metrics["r2"])


def test_a_value_that_a_rank_can_not_compute_matters_only_if_it_is_used() -> None:
    assert_as_single(_fit_uses, "ddp", False)
    failed = run_ranks_unchecked(_fit_uses, 2, "ddp", True)
    message = "R2Score: the value of a part of the batch can't be computed (Needs at least two samples"
    assert message in str(failed[1])


class BatchMean(torchmetrics.Metric):
    """A metric whose state is a plain mean over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, value: float) -> None:
        self.mean = torch.tensor(value)

    def compute(self) -> Tensor:
        return self.mean  # type: ignore[return-value]


class Computes(Net):
    """Computes a metric when an epoch ends, of a value; another one on each rank for none."""

    def __init__(self, values: tuple[float, ...]) -> None:
        super().__init__()
        self.values, self.mean, self.each = values, BatchMean(), torch.nn.ModuleList([SumMetric(), MeanMetric()])

    def on_train_epoch_end(self) -> None:
        metric: Any = self.mean if self.values else self.each[self.global_rank]
        metric.update(self.values[self.global_rank] if self.values else 1.0)
        self.trained = [[int(metric.compute())]]


def _compute(values: tuple[float, ...]) -> list[list[int]]:
    module = Computes(values)
    trainer_of("ddp", max_epochs=1).fit(module, DataLoader(Numbered(4), 2))
    return module.trained


def test_states_that_are_not_sums_and_metrics_of_one_rank_are_refused() -> None:
    assert run_ranks(_compute, 2, (2.0, 2.0)) == [[[2]]] * 2
    for rank in run_ranks_unchecked(_compute, 2, (1.0, 2.0)):
        assert "BatchMean: its state 'mean' is reduced by a plain mean over ranks" in str(rank)
    for rank in run_ranks_unchecked(_compute, 2, ()):
        assert "Compute the same metrics in the same order on all ranks" in str(rank)


class PearsonOfTargets(Net):
    """Correlates inputs with targets that are constant on a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.pearson = double(torchmetrics.PearsonCorrCoef())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.pearson.update(batch[2].double().square(), (batch[2] >= 2).double())
        self.log("pearson", self.pearson)


def _correlate(strategy: str) -> float:
    trainer = trainer_of(strategy)
    (found,) = trainer.validate(PearsonOfTargets(), DataLoader(Numbered(4), 4), verbose=False)
    return found["pearson"]


def test_a_target_that_is_constant_on_each_rank_has_a_correlation() -> None:
    # torchmetrics divides by the largest deviation from the rank's own mean, which is 0 on both ranks: NaN
    assert assert_as_single(_correlate, "ddp", tolerance=1e-6) > 0.5


class SyncedError(Net):
    """Logs the error of all ranks' samples, or trains with it."""

    def __init__(self, is_loss: bool) -> None:
        super().__init__()
        self.is_loss = is_loss
        self.mse = MeanSquaredError(dist_sync_on_step=True).set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        error = self.mse(self.net(batch[0]), batch[1])
        return error if self.is_loss else loss


def _fit_synced(strategy: str, is_loss: bool) -> tuple[Tensor, int, str]:
    module, trainer = SyncedError(is_loss), trainer_of(strategy, max_epochs=1)
    told = refusal(trainer, module, DataLoader(Numbered(9), 4))
    return weights(module), trainer.global_step, told


def test_a_synchronized_metric_may_have_gradients_but_be_no_loss() -> None:
    # nequip's loss is such a metric. Each rank has the gradient of its own samples within the mean of all, which
    # weighting by samples made too small by the number of ranks; where the batch is uneven also wrong in direction.
    for _, num_steps, told in run_ranks(_fit_synced, 2, "ddp", True):
        assert num_steps == 0
        assert "MeanSquaredError has the samples of all ranks (dist_sync_on_step=True)" in told
    assert assert_as_single(_fit_synced, "ddp", False)[1:] == (3, "")
