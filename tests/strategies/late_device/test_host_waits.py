"""On an ordinary step of every strategy the host waits for no device: with logging, callbacks and the bar.

The bar reads values when it refreshes, by the clock on the wall: that is no ordinary step.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import late_device
import pytest
import pytorch_lightning as pl
import torch
from late_device import needs_late_device
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    DDPModelParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.trainer import Trainer

pytestmark = needs_late_device

NUM_STEPS, FIRST = 12, 4
TWO = ["late:0", "late:1"]

STRATEGIES: dict[str, Callable[[], Any]] = {
    "single_device": lambda: SingleDeviceStrategy("late:0"),
    "dp": lambda: DataParallelStrategy(TWO),
    "balanced_dp": lambda: BalancedDataParallelStrategy(weights=[1, 2], devices=TWO),
    "model_parallel": lambda: ModelParallelStrategy(TWO),
    "1f1b": lambda: ModelParallelStrategy(TWO, num_microbatches=2),
    "gpipe": lambda: ModelParallelStrategy(TWO, num_microbatches=2, schedule="gpipe"),
    "ddp": lambda: DDPStrategy(timeout_s=60),
    "fsdp": lambda: FSDPStrategy(timeout_s=60),
    "ddp of replicas": lambda: DDPStrategy(timeout_s=60, devices_per_process=2),
    "ddp_model_parallel": lambda: DDPModelParallelStrategy(timeout_s=60, num_microbatches=2),
}


class Logging(pl.LightningModule):
    """Logs in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("number", 0.5)
        self.log("largest", loss.detach(), reduce_fx="max", on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}}


class Waits(pl.Callback):
    """Collects what the host waits for from one step on, up to the last."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == FIRST:
            self.context = late_device.host_waits()
            self.waits = self.context.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == NUM_STEPS - 1:
            self.context.__exit__(None, None, None)


def _waits(names: list[str], folder: str, num_devices: int) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    found: dict[str, list[str]] = {}
    for name in names:
        waits, x = Waits(), torch.randn(NUM_STEPS * 24, 4)
        trainer = Trainer(
            strategy=STRATEGIES[name](), accelerator="late", devices=num_devices, max_epochs=1,
            logger=CSVLogger(folder), log_every_n_steps=1000, gradient_clip_val=1.0, enable_model_summary=False,
            enable_checkpointing=False, callbacks=[waits, pl.callbacks.LearningRateMonitor()],
        )  # fmt: skip
        data = TensorDataset(x, x[:, 0].gt(0).long())
        size = 24 // (1 if trainer.world_size == 1 else trainer.world_size)
        trainer.fit(Logging(), DataLoader(data, size))
        found[name] = [wait for wait in waits.waits if "progress_bar.py" not in wait]  # reads when it refreshes
    return found


def test_on_an_ordinary_step_the_host_waits_for_no_device(tmp_path: Path) -> None:
    names = [name for name in STRATEGIES if "ddp" not in name and name != "fsdp"]
    found = late_device.run(_waits, names, str(tmp_path), 1)
    assert found == {name: [] for name in names}


@pytest.mark.parametrize(
    ("name", "num_devices"), [("ddp", 2), ("fsdp", 2), ("ddp of replicas", 4), ("ddp_model_parallel", 4)]
)
def test_nor_do_ranks(tmp_path: Path, name: str, num_devices: int) -> None:
    for found in late_device.run_ranks(_waits, 2, [name], str(tmp_path), num_devices):
        assert found == {name: []}
