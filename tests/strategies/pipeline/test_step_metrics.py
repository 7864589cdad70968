"""Metrics that are logged by step under micro-batches show the value of the whole step."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from parity import CLASSES, FEATURES, Samples, as_tuple
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

from evener.strategies import ModelParallelStrategy, SingleDeviceStrategy
from evener.trainer import Trainer


class Measured(pl.LightningModule):
    """Logs metrics as objects: alone, in a collection, and composed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
        self.f1 = MulticlassF1Score(CLASSES)
        self.error = MeanSquaredError()  # its states have a graph, so that torch refuses to copy them
        self.mean, self.largest = MeanMetric(), MaxMetric()
        self.several = MetricCollection({"a": MulticlassAccuracy(CLASSES), "p": MulticlassPrecision(CLASSES)})
        self.composed = 2 * MulticlassPrecision(CLASSES) + MulticlassAccuracy(CLASSES)
        self.steps: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.f1(logits, batch[1])
        self.error(logits[:, 0], batch[1].double())
        self.several(logits, batch[1])
        self.composed(logits, batch[1])
        self.mean(logits.detach().square().mean(1))
        self.largest(logits.detach())
        options: Any = {"on_step": True, "on_epoch": True}
        for name in ("f1", "error", "mean", "largest"):
            self.log(name, getattr(self, name), **options)
        self.log("composed", self.composed, on_step=True, on_epoch=False)
        self.log_dict(self.several, **options)
        return nn.functional.cross_entropy(logits, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        logged = self.trainer.callback_metrics
        self.steps.append({name: float(value) for name, value in logged.items() if not name.endswith("_epoch")})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(strategy: Any, devices: int) -> tuple[dict[str, float], list[dict[str, float]]]:
    trainer = Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    module = Measured()
    trainer.fit(module, DataLoader(Samples(17, as_tuple), 8))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.steps


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("num_microbatches", [2, 3])
def test_step_values_are_one_devices(num_microbatches: int, deterministic: bool) -> None:
    # The value of the last micro-batch was shown.
    strategy = ModelParallelStrategy(num_microbatches=num_microbatches, deterministic=deterministic)
    epoch, steps = fit(strategy, 2)
    expected_epoch, expected_steps = fit(SingleDeviceStrategy(), 1)
    assert epoch == pytest.approx(expected_epoch, rel=1e-6)
    assert len(steps) == len(expected_steps) == 6
    for step, expected in zip(steps, expected_steps, strict=True):
        assert step == pytest.approx(expected, rel=1e-6)
