"""Define what `step_overhead.py` measures: a perceptron, its module for trainers, its loaders and a timer."""

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

WARM_UP = 50
BATCH = 16


class Net(nn.Module):
    """A perceptron with one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


class RankTimer:
    """Seconds per step between the warm-up and the last step."""

    def __init__(self, clock: Callable[[], float], steps: int) -> None:
        self.clock, self.steps, self.calls, self.first, self.last = clock, steps, 0, 0.0, 0.0

    def tick(self) -> None:
        self.calls += 1
        if self.calls == WARM_UP:
            self.first = self.clock()
        elif self.calls == self.steps:
            self.last = self.clock()

    def seconds(self) -> float:
        return (self.last - self.first) / (self.steps - WARM_UP)


class Module(pl.LightningModule):
    """The perceptron for trainers that run a LightningModule."""

    def __init__(self, watch: RankTimer, values: int) -> None:
        super().__init__()
        self.net, self.watch, self.values = Net(), watch, values

    def loss(self, batch: Any) -> torch.Tensor:
        self.watch.tick()
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if self.values:
            self.log("loss", loss, prog_bar=True)
            self.log("scaled", loss.detach() * 2)
            self.log("index", float(batch_idx))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.watch.tick()
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def make_tensors(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(steps, BATCH, 32, generator=generator)
    return inputs, torch.randint(10, (steps, BATCH), generator=generator)


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
