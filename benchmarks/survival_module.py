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
    """Samples with noise from all three libraries, and their numbers.

    Args:
        hang: a file with the rank whose data workers hang as long as it is there.
    """

    def __init__(self, hang: Path) -> None:
        self.hang = hang

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        rank = os.environ.get("LOCAL_RANK", "0")
        if get_worker_info() is not None and self.hang.exists() and self.hang.read_text() == rank:
            time.sleep(300)
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
        val_loader: DataLoader's options for validation, and `loaders`, their number.
        steps: what steps beside the optimizer: `StepLR`, `plateau`, `cyclic` or `restarts`; `two optimizers` are
            stepped by hand.
        pause_s: seconds that a step takes longer than it needs; a batch of validation takes half of that.
        sabotage: a defect of its own: `different`, `hung` or `orphans`; `raise <rank>` in the fourth step, or
            `hang <rank>` after the last one.
    """

    def __init__(
        self, folder: str, loader: dict[str, Any], val_loader: dict[str, Any], pause_s: float, sabotage: str = "",
        steps: str = "StepLR",
    ) -> None:  # fmt: skip
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        ).double()
        self.mean = MeanMetric()
        self.folder, self.pause_s, self.sabotage = Path(folder), pause_s, sabotage
        self.loader, self.val_loader = dict(loader), dict(val_loader)
        self.life = ""
        self.steps, self.automatic_optimization = steps, steps != "two optimizers"

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
        if not self.automatic_optimization:
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            optimizers[batch_idx % 2].step()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("batch", self.current_epoch, batch_idx, batch[1].tolist(), outputs["loss"].item().hex())

    def on_train_epoch_end(self) -> None:
        self.tell("epoch end")
        self.log("train/mean", self.mean.compute(), sync_dist=True)
        self.mean.reset()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.tell("validation")
        time.sleep(self.pause_s / 2)
        name = f"val/{dataloader_idx}" if dataloader_idx else "val/loss"
        self.log(name, self.layers(batch[0]).square().mean(), sync_dist=True, add_dataloader_idx=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.tell("save")

    def on_train_end(self) -> None:
        self.tell("end")
        if self.sabotage in ("hung", f"hang {self.global_rank}"):
            self.tell("event", time.time())
            time.sleep(300)

    def configure_optimizers(self) -> Any:
        if not self.automatic_optimization:
            first, *others = self.layers.children()
            parts = [list(first.parameters()), [p for other in others for p in other.parameters()]]
            return [torch.optim.AdamW(part, lr=0.05) for part in parts], []
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedulers = torch.optim.lr_scheduler
        made: dict[str, Any] = {
            "StepLR": lambda: schedulers.StepLR(optimizer, 1, 0.7),
            # a threshold that no loss reaches: each epoch counts
            "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0),
            "cyclic": lambda: schedulers.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
            "restarts": lambda: schedulers.CosineAnnealingWarmRestarts(optimizer, 4),
        }
        interval = "step" if self.steps in ("cyclic", "restarts") else "epoch"
        config = {"scheduler": made[self.steps](), "interval": interval, "monitor": "val/loss", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def train_dataloader(self) -> DataLoader[Any]:
        options = dict(self.loader)
        if options.pop("dataset") == "stream":
            return DataLoader(Stream(), BATCH_SIZE, **_forked(options))
        return DataLoader(Noisy(self.folder / "hang"), BATCH_SIZE, shuffle=True, **_forked(options))

    def val_dataloader(self) -> list[DataLoader[Any]]:
        options = dict(self.val_loader)
        number = options.pop("loaders", 1)
        return [DataLoader(Noisy(self.folder / "none"), 11, **_forked(options)) for _ in range(number)]


def _forked(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "multiprocessing_context": "fork"} if options.get("num_workers") else options
