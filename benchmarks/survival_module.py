"""What the runs of `survival.py` train: a module that writes down all it sees, and where it is."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchmetrics import MeanMetric

NUM_SAMPLES = 44
BATCH_SIZE = 4


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Samples with noise from all three libraries, and their numbers."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = random.random() + np.random.rand() + torch.rand(())
        return torch.full((3,), index / 10, dtype=torch.float64) + noise, index


class Streamed(IterableDataset[tuple[torch.Tensor, int]]):
    """The samples in order, shared among workers; with noise in workers only, whose streams are made anew."""

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, NUM_SAMPLES, step):
            noise = 0.0 if worker is None else random.random() + np.random.rand() + torch.rand(())
            yield torch.full((3,), index / 10, dtype=torch.float64) + noise, index


class Told(pl.LightningModule):
    """Writes the samples and the loss of every batch to a file, and its phase to another.

    Args:
        folder: of the files.
        attempt: number of this attempt at the run.
        loader: what distinguishes the training loader: `dataset` (`map` or `stream`) and DataLoader's own options.
        val_loader: DataLoader's options for validation.
        pause_s: seconds that a step takes longer than it needs, and a batch of validation half of that.
    """

    def __init__(
        self, folder: str, attempt: int, loader: dict[str, Any], val_loader: dict[str, Any], pause_s: float, **_: Any
    ) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        ).double()
        self.mean = MeanMetric()
        self.folder, self.attempt, self.pause_s = Path(folder), attempt, pause_s
        self.loader, self.val_loader = dict(loader), dict(val_loader)

    def phase(self, name: str) -> None:
        """Tell where this rank is."""
        with open(self.folder / f"phases{self.attempt}.{self.global_rank}", "a") as file:
            file.write(f"{os.getpid()} {name}\n")

    def setup(self, stage: str) -> None:
        self.phase("start")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.phase("step")
        inputs, ids = batch
        loss = self.layers(inputs).square().mean()
        self.mean.update(loss.detach(), len(ids))
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(ids), sync_dist=True)
        line = [self.trainer.current_epoch, batch_idx, ids.tolist(), loss.item().hex()]
        with open(self.folder / f"batches{self.attempt}.{self.global_rank}", "a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(self.pause_s)
        return loss

    def on_train_epoch_end(self) -> None:
        self.phase("epoch end")
        self.log("train/mean", self.mean.compute(), sync_dist=True)
        self.mean.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.phase("validation")
        time.sleep(self.pause_s / 2)
        self.log("val/loss", self.layers(batch[0]).square().mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.phase("save")

    def on_train_end(self) -> None:
        self.phase("end")
        metrics = {name: float(value).hex() for name, value in sorted(self.trainer.callback_metrics.items())}
        if self.global_rank == 0 and not self.trainer.interrupted:
            weights = {name: value.detach().cpu().clone() for name, value in self.state_dict().items()}
            torch.save({"weights": weights, "metrics": metrics}, self.folder / "end.tmp")
            (self.folder / "end.tmp").replace(self.folder / f"end{self.attempt}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

    def train_dataloader(self) -> DataLoader[Any]:
        options = dict(self.loader)
        stream = options.pop("dataset") == "stream"
        return DataLoader(Streamed() if stream else Noisy(), BATCH_SIZE, shuffle=not stream, **_with_context(options))

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Noisy(), 11, **_with_context(self.val_loader))


def _with_context(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "multiprocessing_context": "fork"} if options.get("num_workers") else options
