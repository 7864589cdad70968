"""Metrics that count calls, or see the range of a call's samples, are one device's under micro-batches."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics as tm
from parity import CLASSES, Case, Net, make_trainer
from torch import Tensor, nn
from torchmetrics.wrappers import MinMaxMetric, Running

from evener.strategies import ConfigError, ModelParallelStrategy, SingleDeviceStrategy


def accuracy() -> Any:
    return tm.Accuracy("multiclass", num_classes=CLASSES)


class Measured(Net):
    def __init__(self, make: Callable[[], Any], of_loss: bool) -> None:
        super().__init__()
        self.metric, self.of_loss = make(), of_loss
        self.values: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        loss = nn.functional.cross_entropy(out, batch[1])
        self.metric(loss) if self.of_loss else self.metric(out, batch[1])
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values += [self.metric._forward_cache, self.metric.compute()]


METRICS: dict[str, tuple[Callable[[], Any], bool]] = {
    "running": (lambda: Running(accuracy(), 2), False),
    "running mean": (lambda: tm.RunningMean(3), True),
    "mean": (tm.MeanMetric, True),
    "composed": (lambda: accuracy() + 1.0, False),
    "minmax": (lambda: MinMaxMetric(accuracy()), False),
}


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", METRICS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_metrics_that_count_calls_equal_one_device(name: str, deterministic: bool) -> None:
    """`Running` saw each micro-batch as a batch, and a mean of losses weighed them all alike."""
    make, of_loss = METRICS[name]
    values: list[Any] = []
    mp = ModelParallelStrategy(num_microbatches=3, deterministic=deterministic)
    for strategy, devices in ((mp, 2), (SingleDeviceStrategy(), 1)):
        torch.manual_seed(3)
        module = Measured(make, of_loss).double()
        trainer = make_trainer(Case(), strategy, devices=devices, limit_val_batches=0)
        trainer.fit(module, Case().loader(), Case().loader())
        values.append(module.values)
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-6, check_dtype=False)


def test_a_value_of_a_micro_batch_is_refused() -> None:
    class Computing(Measured):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("accuracy", self.metric.compute())
            return loss

    trainer = make_trainer(Case(), ModelParallelStrategy(num_microbatches=2), devices=2, limit_val_batches=0)
    with pytest.raises(ConfigError, match=r"model_parallel: MulticlassAccuracy.compute\(\) was called in a step"):
        trainer.fit(Computing(accuracy, False).double(), Case().loader(), Case().loader())
    assert trainer.global_step == 0


@pytest.mark.parametrize("make", [accuracy, tm.MeanMetric])
def test_methods_are_replaced_once_per_run_and_restored(make: Callable[[], Any]) -> None:
    """They were replaced anew in each step."""
    seen: list[list[Any]] = []

    class Watching(Measured):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            seen.append([vars(self.metric).get(name) for name in ("forward", "compute", "update")])
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            copy = pickle.loads(pickle.dumps(self.metric))
            assert copy.compute() == self.metric.compute()
            assert copy.forward.__self__ is copy

    module = Watching(make, make is tm.MeanMetric).double()
    before = {name: vars(module.metric).get(name) for name in ("forward", "compute", "update")}
    trainer = make_trainer(Case(), ModelParallelStrategy(num_microbatches=2), devices=2, limit_val_batches=0)
    trainer.fit(module, Case().loader(), Case().loader())
    assert len(seen) > 2
    assert all(found == seen[0] for found in seen)
    assert {name: vars(module.metric).get(name) for name in before} == before
