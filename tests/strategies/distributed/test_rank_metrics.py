"""Metrics of torchmetrics under ranks are one device's: states, running windows, step values, numbers for a batch."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics as tm
from distributed import run_ranks, run_ranks_unchecked
from regression import Net, Numbered, assert_as_single, assert_same, trainer_of
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanAbsoluteError, MeanMetric, MeanSquaredError, SumMetric
from torchmetrics.wrappers import Running


def double(metric: tm.Metric) -> Any:
    return metric.set_dtype(torch.float64)


class PerSample(tm.Metric):
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
    """Feeds metrics whose values depend on every sample, or on the last batches; some are asked in the steps `asks`."""

    def __init__(self, asks: tuple[int, ...], has_windows: bool) -> None:
        super().__init__()
        self.asks, self.has_windows, self.by_step = asks, has_windows, False
        self.logged = nn.ModuleDict()
        for stage in ("train", "val"):
            self.logged[f"{stage}_window"] = Running(SumMetric(), 2)
            self.logged[f"{stage}_composed"] = double(MeanSquaredError(squared=False)) + double(MeanAbsoluteError())
        self.boxes, self.each, self.train_each = PerSample(), CatMetric(), CatMetric()
        self.train_window = Running(MeanMetric(), 2)
        self.never_reset = double(MeanAbsoluteError(dist_sync_on_step=True))  # some ranks have fewer batches
        self.error = double(MeanAbsoluteError())
        self.found: dict[str, Any] = {"never reset": []}

    def _log(self, stage: str, batch: Any) -> None:
        x, y, index = batch
        for kind, given in (("composed", (x[:, 0], y[:, 0])), ("window", (index.double(),))):
            name = f"{stage}_{kind}"
            if kind != "window" or self.has_windows:
                self.logged[name](*given)
                self.log(name, self.logged[name], on_step=self.by_step, on_epoch=True, sync_dist=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._log("train", batch)
        self.train_each.update(batch[2])
        if self.has_windows:
            self.train_window.update(batch[2])
        self.error.update(self.net(batch[0]), batch[1])
        if batch_idx in self.asks:
            for name in ("error", "train_each", "train_window")[: 2 + self.has_windows]:
                value = getattr(self, name).compute().double().sum()
                self.log(f"{name}_{batch_idx}", value, batch_size=1, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log("val", batch)
        self.never_reset(self.net(batch[0]), batch[1])
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
    strategy: str, num: int, asks: tuple[int, ...], has_windows: bool = False, by_step: bool = False
) -> tuple[dict[str, Any], dict[str, float]]:
    module, loader = Measured(asks, has_windows), DataLoader(Numbered(num), 4)
    module.by_step = by_step
    trainer = trainer_of(strategy, max_epochs=1, num_sanity_val_steps=1)
    trainer.fit(module, loader, loader)
    return module.found, {name: float(value) for name, value in trainer.callback_metrics.items()}


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
    # with replicas the errors are counted in float32
    found, _ = assert_as_single(
        _fit, strategy, num, asks, has_windows, tolerance=1e-6 if strategy == "replicas" else 1e-10
    )
    assert found["each"] == list(range(num))


def test_in_steps_metrics_are_a_ranks_own_and_in_those_of_evaluation_none() -> None:
    expected, final = _fit("single", 9, ())
    for found, logged in run_ranks(_fit, 2, "ddp", 9, (), False, True):
        assert [name for name in logged if name.endswith("_step")] == ["train_composed_step"]
        epoch = {name.removesuffix("_epoch"): value for name, value in logged.items()}
        assert_same((found, {name: epoch[name] for name in final}), (expected, final), 1e-10)


def test_windows_that_hold_other_batches_on_some_ranks_are_refused() -> None:
    for rank in run_ranks_unchecked(_fit, 2, "ddp", 9, (), True):
        assert "Running(SumMetric): its window holds other batches on some ranks" in str(rank)


class Uses(Net):
    """Logs the epoch's value only, or uses what `forward` returned."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.uses = uses
        self.r2 = double(tm.R2Score())

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
    assert "R2Score: the value of a part of the batch can't be computed (Needs at least two samples" in str(failed[1])


class BatchMean(tm.Metric):
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
        self.values, self.mean, self.each = values, BatchMean(), nn.ModuleList([SumMetric(), MeanMetric()])

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


class OfCallback(pl.Callback):
    """Keeps a metric that is no part of the module, and updates it between two steps."""

    def __init__(self) -> None:
        self.mean = MeanMetric()
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
            **{name: MeanMetric() for name in means}, **{name: SumMetric() for name in sums},
            **{name: tm.RunningMean(2) for name in ("window", "train_window")[: 2 * has_windows]},
            "unchecked": MeanMetric(nan_strategy="disable"), "largest": tm.MaxMetric(), "smallest": tm.MinMetric(),
            "each": CatMetric(), "losses": CatMetric(),
        }  # fmt: skip
        self.of = nn.ModuleDict(made)
        self.pair = tm.MetricCollection([MeanMetric()], prefix="pair_")
        self.found: list[dict[str, Any]] = []
        self.within: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = ((self.net(batch[0]) - batch[1]) ** 2).mean()
        self.of["trained"](loss)
        if "train_window" in self.of:
            self.of["train_window"].update(loss.detach())
        self.log("train", self.of["trained"], on_step=False, on_epoch=True, sync_dist=True)
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


def _aggregate(strategy: str, num: int, in_parts: bool, devices: dict[str, int]) -> dict[str, Any]:
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
    single = assert_as_single(_aggregate, strategy, num, in_parts, {}, tolerance=1e-5)  # aggregators round to float32
    assert [len(found["each"]) for found in single["found"]] == [3, 6]
    assert [float(found["epochs"]) for found in single["found"]] == [1.5, 3.0]
    assert {"train", "val", "pair_MeanMetric"} <= set(single["logged"])


def test_a_number_that_may_be_the_value_of_one_sample_is_refused() -> None:
    for rank in run_ranks_unchecked(_aggregate, 3, "ddp", 8, False, {"devices": 3}):  # 2, 1 and 1 of 4 samples
        assert "MeanMetric was given numbers on a rank, on another a sample's" in str(rank)


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
