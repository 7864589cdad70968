"""Define the project's own module and data: tell apart the arms of three spirals. Replace both with yours."""

import math
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

NUM_ARMS = 3


class SpiralClassifier(pl.LightningModule):
    """A small network over points, shape (N, 2) to (N, 3)."""

    def __init__(self, lr: float = 0.01, hidden: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, NUM_ARMS)
        )

    def forward(self, points: Tensor) -> Tensor:
        return self.net(points)

    def loss(self, batch: list[Tensor], name: str) -> Tensor:
        points, arms = batch
        scores = self(points)
        loss = nn.functional.cross_entropy(scores, arms)
        accuracy = (scores.argmax(dim=1) == arms).float().mean()
        self.log(f"{name}/loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(arms))
        self.log(f"{name}/acc", accuracy, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(arms))
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class SpiralData(pl.LightningDataModule):
    """Points of three noisy spirals: 70% for training, 15% for validation, 15% for testing."""

    def __init__(self, batch_size: int = 32, num_points: int = 3000) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_points = num_points

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        arms = torch.arange(self.num_points) % NUM_ARMS
        radius = torch.rand(self.num_points, generator=generator).sqrt()
        angle = radius * 1.5 * math.pi + arms * 2 * math.pi / NUM_ARMS
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        points += 0.03 * torch.randn(points.shape, generator=generator)
        parts = random_split(TensorDataset(points, arms), [0.7, 0.15, 0.15], generator)
        self.train, self.val, self.test = parts

    def loader(self, part: Any, shuffle: bool = False) -> DataLoader[Any]:
        pinned = torch.cuda.is_available()  # copies of batches to a GPU do not wait then
        return DataLoader(part, batch_size=self.batch_size, shuffle=shuffle, pin_memory=pinned)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.val)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.test)
