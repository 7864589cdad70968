"""On an ordinary step of every strategy the host waits for no device: with logging, callbacks and the bar.

The bar reads values when it refreshes, by the clock on the wall: that is no ordinary step.
"""

import warnings
from collections.abc import Callable
from functools import partial
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
    BalancedDDPStrategy,
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
    "single_device": partial(SingleDeviceStrategy, "late:0"),
    "dp": partial(DataParallelStrategy, TWO),
    "balanced_dp": partial(BalancedDataParallelStrategy, weights=[1, 2], devices=TWO),
    "model_parallel": partial(ModelParallelStrategy, TWO),
    "1f1b": partial(ModelParallelStrategy, TWO, num_microbatches=2),
    "gpipe": partial(ModelParallelStrategy, TWO, num_microbatches=2, schedule="gpipe"),
}
OF_RANKS: dict[str, Callable[[], Any]] = {
    "ddp": partial(DDPStrategy, timeout_s=60),
    "fsdp": partial(FSDPStrategy, timeout_s=60),
    "ddp of replicas": partial(DDPStrategy, timeout_s=60, devices_per_process=2),
    "ddp_model_parallel": partial(DDPModelParallelStrategy, timeout_s=60, num_microbatches=2),
    "global ddp": partial(DDPStrategy, "global", timeout_s=60),
    "balanced_ddp": partial(BalancedDDPStrategy, weights=[2, 1], timeout_s=60),
}


class Logging(pl.LightningModule):
    """Logs in several ways, keeps an attribute as many modules do, and returns a `loss_weight` of a kind, or none."""

    last_loss: Any = None

    def __init__(self, weight: str) -> None:
        super().__init__()
        self.weight = weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        layers = [nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x, y = batch
        loss = self.last_loss = nn.functional.cross_entropy(self.frozen(self.net(x)), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("number", 0.5)
        self.log("largest", loss.detach(), reduce_fx="max", on_epoch=True)
        self.log("smallest", loss.detach(), reduce_fx=min, on_epoch=True)
        self.log("sum", loss.detach(), reduce_fx="sum", on_epoch=True, batch_size=len(x))
        self.log_dict({"a": loss.detach() * 2, "b": 1.0})
        output = {"loss": loss, "accuracy": loss.detach() * 0.1, "rate": 0.5}
        weights = {"number": lambda: float(len(x)), "tensor": lambda: (x[:, 0] > -9).sum()}
        return {**output, "loss_weight": weights[self.weight]()} if self.weight else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}}


class Waits(pl.Callback):
    """Collects what the host waits for from one step on, up to the last."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.context: Any = None
        self.has_ended = False

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == FIRST and not self.context:
            self.context = late_device.host_waits()
            self.waits = self.context.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == NUM_STEPS - 1 and not self.has_ended:
            self.context.__exit__(None, None, None)
            self.has_ended = True


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("", {}), ("number", {}), ("tensor", {}), ("number", {"accumulate_grad_batches": 2, "exact_accumulation": True})
]  # fmt: skip


def _waits(names: list[str], folder: str, num_devices: int) -> list[str]:
    """What the host waited for, with the name of the strategy."""
    warnings.simplefilter("ignore")
    found = []
    x = torch.randn(2 * NUM_STEPS * 24, 4)
    data = TensorDataset(x, x[:, 0].gt(0).long())
    for name in names:
        for weight, options in WAYS:
            waits = Waits()
            trainer = Trainer(
                strategy=(STRATEGIES | OF_RANKS)[name](), accelerator="late", devices=num_devices, max_steps=NUM_STEPS,
                logger=CSVLogger(folder), log_every_n_steps=1000, gradient_clip_val=1.0, enable_model_summary=False,
                enable_checkpointing=False, callbacks=[waits, pl.callbacks.LearningRateMonitor()], **options,
            )  # fmt: skip
            trainer.fit(Logging(weight), DataLoader(data, 24 // trainer.world_size))
            assert waits.has_ended
            shown = [wait for wait in waits.waits if "progress_bar.py" not in wait]  # reads when it refreshes
            found += [f"{name}, {weight} {options}: {wait}" for wait in shown]
    return found


def test_on_an_ordinary_step_the_host_waits_for_no_device(tmp_path: Path) -> None:
    assert late_device.run(_waits, list(STRATEGIES), str(tmp_path), 1) == []


@pytest.mark.parametrize(
    ("names", "num_devices"),
    [(["ddp", "global ddp", "balanced_ddp"], 2), (["fsdp"], 2), (["ddp of replicas", "ddp_model_parallel"], 4)],
)
def test_nor_do_ranks(tmp_path: Path, names: list[str], num_devices: int) -> None:
    assert late_device.run_ranks(_waits, 2, names, str(tmp_path), num_devices) == [[], []]
