"""Train a module that writes down where it is, and all samples and losses that it sees, for `survival.py`."""

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
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


class Stream(IterableDataset[tuple[torch.Tensor, int]]):
    """The samples in order, divided among workers; noisy in workers only, as docs/checkpoints.md says."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, NUM_SAMPLES, step):
            noise = 0.0 if worker is None else random.random() + np.random.rand() + torch.rand(())
            yield torch.full((3,), index / 10, dtype=torch.float64) + noise, index


class Diary(pl.LightningModule):
    """Writes, in every process, a line for each phase and each batch to a file of its own.

    Args:
        folder: of the files, `<nanoseconds>-<rank>-<process>.life`.
        loader: what distinguishes the training loader: `dataset` (`map` or `stream`) and DataLoader's own options.
        val_loader: DataLoader's options for validation.
        pause_s: seconds that a step takes longer than it needs; a batch of validation takes half of that.
        sabotage: a defect of its own: `different`, `hung` or `orphans`; `raise <rank>` in the fourth step, or
            `hang <rank>` after the last one.
    """

    def __init__(
        self, folder: str, loader: dict[str, Any], val_loader: dict[str, Any], pause_s: float, sabotage: str = ""
    ) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        ).double()
        self.mean = MeanMetric()
        self.folder, self.pause_s, self.sabotage = Path(folder), pause_s, sabotage
        self.loader, self.val_loader = dict(loader), dict(val_loader)
        self.life = ""

    def tell(self, *what: Any) -> None:
        with open(self.life, "a") as file:
            file.write(json.dumps(what) + "\n")

    def setup(self, stage: str) -> None:
        self.life = str(self.folder / f"{time.time_ns()}-{self.global_rank}-{os.getpid()}.life")
        self.tell("start")
        if self.sabotage == "orphans":
            subprocess.Popen(["sleep", "300"], start_new_session=True)

    def on_train_start(self) -> None:
        self.is_resumed = self.global_step > 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.tell("step")
        if self.sabotage == "different" and self.is_resumed:
            torch.rand(())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, ids = batch
        loss = self.layers(inputs).square().mean()
        if self.sabotage == f"raise {self.global_rank}" and self.global_step == 3:
            self.tell("event", time.time())
            raise ValueError("on purpose")
        self.mean.update(loss.detach(), len(ids))
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(ids), sync_dist=True)
        time.sleep(self.pause_s)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("batch", self.current_epoch, batch_idx, batch[1].tolist(), outputs["loss"].item().hex())

    def on_train_epoch_end(self) -> None:
        self.tell("epoch end")
        self.log("train/mean", self.mean.compute(), sync_dist=True)
        self.mean.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.tell("validation")
        time.sleep(self.pause_s / 2)
        self.log("val/loss", self.layers(batch[0]).square().mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.tell("save")

    def on_train_end(self) -> None:
        self.tell("end")
        if self.sabotage in ("hung", f"hang {self.global_rank}"):
            self.tell("event", time.time())
            time.sleep(300)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

    def train_dataloader(self) -> DataLoader[Any]:
        options = dict(self.loader)
        if options.pop("dataset") == "stream":
            return DataLoader(Stream(), BATCH_SIZE, **_forked(options))
        return DataLoader(Noisy(), BATCH_SIZE, shuffle=True, **_forked(options))

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Noisy(), 11, **_forked(self.val_loader))


def _forked(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "multiprocessing_context": "fork"} if options.get("num_workers") else options
