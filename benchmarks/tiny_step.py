"""Define what `step_overhead.py` measures: a perceptron, its module for trainers, its loaders and a timer."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassCohenKappa, MulticlassF1Score

WARM_UP = 50
BATCH = 16
CLASSES = 10
ACCUMULATE = 4
CLIP = 1.0
LOG_EVERY = 50
"""Steps between logged points: Lightning's default."""


class Net(nn.Module):
    """A perceptron with one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def make_metrics() -> MetricCollection:
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(CLASSES),
            "f1": MulticlassF1Score(CLASSES),
            "kappa": MulticlassCohenKappa(CLASSES),
        }
    )


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.9)


@dataclass
class Seconds:
    """Seconds per step."""

    processor: float
    wall: float


class StepTimer:
    """Processor time of this process and wall time per step, between the warm-up and the last step."""

    def __init__(self, steps: int) -> None:
        self.steps, self.calls = steps, 0
        self.times: list[tuple[float, float]] = []

    def tick(self) -> None:
        self.calls += 1
        if self.calls in (WARM_UP, self.steps):
            self.times.append((time.process_time(), time.perf_counter()))

    def seconds(self) -> Seconds:
        (first, wall_first), (last, wall_last) = self.times
        steps = self.steps - WARM_UP
        return Seconds((last - first) / steps, (wall_last - wall_first) / steps)


class Module(pl.LightningModule):
    """The perceptron for trainers that run a LightningModule.

    Args:
        timer: told of every step.
        case: `bare`, `typical` or `rich` training; evaluation of any other case but `bare` has metrics.
    """

    def __init__(self, timer: StepTimer, case: str) -> None:
        super().__init__()
        self.net, self.case = Net(), case
        self._tick: Callable[[], None] = timer.tick
        self._own_id = id(self)
        if case not in ("bare", "typical"):
            self.metrics = make_metrics()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.device_is_first():
            self._tick()
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        if self.case != "bare":
            self.log("loss", loss, prog_bar=True)
            self.log("scaled", loss.detach() * 2)
            self.log("mean_loss", loss, on_step=False, on_epoch=True)
        if self.case == "rich":
            self.metrics.update(logits.detach(), batch[1])
            self.log_dict(self.metrics, on_step=False, on_epoch=True)  # type: ignore[arg-type]
        return loss

    def device_is_first(self) -> bool:
        """Whether this is the module itself, and no replica of it."""
        return id(self) == self._own_id

    def evaluation_step(self, batch: Any) -> None:
        if self.device_is_first():
            self._tick()
        logits = self.net(batch[0])
        self.log("eval_loss", nn.functional.cross_entropy(logits, batch[1]))
        if self.case != "bare":
            self.metrics.update(logits, batch[1])
            self.log_dict(self.metrics, on_step=False, on_epoch=True)  # type: ignore[arg-type]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluation_step(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluation_step(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.device_is_first():
            self._tick()
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        if self.case != "rich":
            return optimizer
        return [optimizer], [{"scheduler": make_scheduler(optimizer), "interval": "step"}]


class SampleCount(pl.Callback):
    """Counts samples: a callback with a hook for batches, as users write them."""

    def __init__(self) -> None:
        self.num_samples = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.num_samples += len(batch[0])


def make_tensors(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(steps, BATCH, 32, generator=generator)
    return inputs, torch.randint(CLASSES, (steps, BATCH), generator=generator)


def make_loader(steps: int) -> DataLoader[Any]:
    inputs, targets = make_tensors(steps)
    # precomputed batches, to measure the trainer without collation
    return DataLoader([(x, y) for x, y in zip(inputs, targets, strict=True)], batch_size=None, collate_fn=lambda b: b)  # type: ignore[arg-type]


class Ready(torch.utils.data.Dataset[Any]):
    """A dataset read by whole precomputed batches, with a sampler that can be split among ranks."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs) * BATCH

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[indices[0] // BATCH], self.targets[indices[0] // BATCH]


def make_shared_loader(steps: int) -> DataLoader[Any]:
    """A loader of `steps` batches for each of two ranks."""
    dataset = Ready(*make_tensors(2 * steps))
    return DataLoader(dataset, batch_size=BATCH, collate_fn=lambda batch: batch)
