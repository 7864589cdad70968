"""Define a project's own module and data: classify scikit-learn's wines by 13 chemical measurements."""

from typing import Any

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_wine
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class WineClassifier(pl.LightningModule):
    """A two-layer network over standardized measurements, shape (N, 13) to (N, 3)."""

    def __init__(self, lr: float, hidden: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(13, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def loss(self, batch: list[Tensor], name: str) -> Tensor:
        measurements, kind = batch
        scores = self.net(measurements)
        loss = nn.functional.cross_entropy(scores, kind)
        accuracy = (scores.argmax(dim=1) == kind).float().mean()
        self.log(f"{name}/loss", loss, on_step=False, on_epoch=True, batch_size=len(kind))
        self.log(f"{name}/acc", accuracy, on_step=False, on_epoch=True, batch_size=len(kind))
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class WineData(pl.LightningDataModule):
    """The 178 wines: 118 for training, 30 for validation, 30 for testing."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        measurements, kind = load_wine(return_X_y=True)
        values = torch.tensor(measurements, dtype=torch.float32)
        values = (values - values.mean(dim=0)) / values.std(dim=0)
        wines = TensorDataset(values, torch.tensor(kind))
        order = torch.randperm(len(wines), generator=torch.Generator().manual_seed(0)).tolist()
        self.train, self.val, self.test = (Subset(wines, part) for part in (order[:118], order[118:148], order[148:]))

    def loader(self, part: Subset[Any], shuffle: bool = False) -> DataLoader[Any]:
        pinned = torch.cuda.is_available()  # copies of batches to a GPU do not wait then
        return DataLoader(part, batch_size=self.batch_size, shuffle=shuffle, pin_memory=pinned)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.val)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.test)
