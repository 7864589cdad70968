"""Train a module that kills or freezes its process at a given point, and writes down its samples, for `goodput.py`."""

import faulthandler
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torchmetrics import MeanAbsoluteError

from evener.strategies.distributed import survivors

NUM_SAMPLES, BATCH_SIZE = 52, 8


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Numbered samples, with noise where a data worker draws it."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = get_worker_info() is not None
        noise = random.random() + np.random.rand() + float(torch.rand(())) if drawn else 0.0
        features = torch.linspace(-1, 1, 6, dtype=torch.float64)
        return torch.sin(features * (index + 1)) + 0.1 * noise, index


class Killed(pl.LightningModule):
    """Kills its process once it has been at a point so often, and a moment later.

    Args:
        folder: of what it writes; `plan.json` has what it does: rank, point, times, delay_s, signal.
        pause_s: seconds that a step takes longer than it needs.
        width: of the network.
    """

    def __init__(self, folder: str, pause_s: float, num_workers: int, steps: str, width: int = 16) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
        ).double()
        self.error, self.val_error = (MeanAbsoluteError().set_dtype(torch.float64) for _ in range(2))
        self.folder, self.pause_s, self.num_workers, self.steps = Path(folder), pause_s, num_workers, steps
        faulthandler.register(signal.SIGUSR2)  # `end_all` asks what is left where it is
        self.own_rank = int(os.environ.get("RANK", "0"))
        path = self.folder / "plan.json"
        plan = json.loads(path.read_text()) if path.exists() else []
        self.plan = [one for one in plan if one["rank"] == self.own_rank]
        self.counts: dict[str, list[int]] = {}
        for one in self.plan:
            if one["point"] == "after another":
                threading.Thread(target=self._follow, args=(one,), daemon=True).start()

    def tell(self, *what: Any) -> None:
        group, rank = (0, self.own_rank) if survivors.own is None else (survivors.own.group, survivors.own.rank)
        with (self.folder / f"{rank}-{os.getpid()}.life").open("a") as file:
            file.write(json.dumps([time.time(), group, *what]) + "\n")

    def at(self, point: str) -> None:
        counted = self.counts.setdefault(point, [0])  # a list: a section that is done again counts once more
        counted[0] += 1
        for one in self.plan:
            if (one["point"], one["times"]) == (point, counted[0]) and self._claim(one):
                if one["delay_s"]:
                    threading.Timer(one["delay_s"], self._end, [one]).start()
                else:
                    self._end(one)

    def _claim(self, one: dict[str, Any]) -> bool:
        """Whether this is done for the first time, and not again after a restart."""
        try:
            (self.folder / f"claimed-{one['number']}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _follow(self, one: dict[str, Any]) -> None:
        while not (self.folder / f"fired-{one['number'] - 1}").exists():
            time.sleep(0.002)
        time.sleep(one["delay_s"])
        if self._claim(one):
            self._end(one)

    def _end(self, one: dict[str, Any]) -> None:
        path = self.folder / f"fired-{one['number']}"
        path.with_suffix(".new").write_text(str(time.time()))
        path.with_suffix(".new").rename(path)
        os.kill(os.getpid(), one["signal"])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.tell("batch", self.current_epoch, batch_idx, batch[1].tolist())
        self.at("any")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, ids = batch
        hidden = self.layers[:2](inputs)
        self.at("forward")
        hidden.register_hook(lambda gradient: self.at("backward"))
        outputs = self.layers[2:](hidden)
        targets = torch.cos(ids.double())[:, None]
        loss = torch.nn.functional.mse_loss(outputs, targets)
        self.error.update(outputs, targets)
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(ids), sync_dist=True)
        self.log("train/error", self.error, on_step=False, on_epoch=True)
        time.sleep(self.pause_s * random.Random(self.global_step).random() * 2)
        return loss

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.at("reduction")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.at("optimizer")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at("logging")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.tell("validation")
            self.at("validating")
        outputs, targets = self.layers(batch[0]), torch.cos(batch[1].double())[:, None]
        self.val_error.update(outputs, targets)
        self.log("val/loss", torch.nn.functional.mse_loss(outputs, targets), batch_size=len(batch[1]))
        self.log("val/error", self.val_error)

    def on_train_epoch_end(self) -> None:
        self.tell("epoch end")
        self.at("between epochs")

    def on_train_epoch_start(self) -> None:
        self.tell("epoch start")
        self.at("epoch start")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.tell("save")
        self.at("saving")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedulers = torch.optim.lr_scheduler
        made: dict[str, Any] = {
            "StepLR": lambda: schedulers.StepLR(optimizer, 1, 0.9),
            "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer, factor=0.8, patience=0, threshold=10.0),
            "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, 40),
        }
        interval = "step" if self.steps == "cosine" else "epoch"
        config = {"scheduler": made[self.steps](), "interval": interval, "monitor": "val/loss", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def _loader(self, size: int, **options: Any) -> DataLoader[Any]:
        if self.num_workers:
            options |= {"num_workers": self.num_workers, "multiprocessing_context": "fork"}
        return DataLoader(Samples(size), BATCH_SIZE, **options)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(NUM_SAMPLES, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(21)


STOP, KILL = int(signal.SIGSTOP), int(signal.SIGKILL)
