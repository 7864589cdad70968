"""Law 3: on steps that neither log, validate nor save, no strategy makes the host wait for a device."""

import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from host_reads import HostReads
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import (
    BalancedDataParallelStrategy,
    BalancedDDPModelParallelStrategy,
    BalancedDDPStrategy,
    DataParallelStrategy,
    DDPModelParallelStrategy,
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.trainer import Trainer

NUM_STEPS = 50


class Logs(pl.LightningModule):
    """Logs numbers and tensors in all the ways that modules do, and keeps attributes as many modules do."""

    is_weighed = True
    """Whether it returns a `loss_weight`, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.last_loss: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self.frozen(self.net(x)), y)
        self.last_loss = loss
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        self.log("number", 0.5, on_epoch=True)
        self.log("step_number", 0.25)
        self.log("largest", loss.detach(), reduce_fx="max", on_epoch=True)
        self.log("smallest", loss.detach(), reduce_fx=min, on_epoch=True)
        self.log("sum", loss.detach(), reduce_fx="sum", on_epoch=True)
        self.log_dict({"a": loss.detach() * 2, "b": 1.0})
        output = {"loss": loss, "accuracy": (loss.detach() * 0.1), "rate": 0.5}
        return {**output, "loss_weight": float(len(x))} if self.is_weighed else output

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5),
                "interval": "step",
            },
        }


class LogsTensorWeight(Logs):
    """Its loss weight is a tensor on the device."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {**super().training_step(batch, batch_idx), "loss_weight": (batch[0][:, 0] > -9).sum()}


class LogsOnly(Logs):
    """Returns no loss weight."""

    is_weighed = False


def reads_of(strategy: Any, module: Any, devices: int, **options: Any) -> list[str]:
    """Train, and return the reads of steps 5 to 20."""
    torch.manual_seed(0)
    x: Tensor = torch.randn(NUM_STEPS * 12, 4)
    data = DataLoader(TensorDataset(x, torch.randint(0, 3, (len(x),))), batch_size=12)
    reads = HostReads()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_steps=22,
        max_epochs=10,
        callbacks=[reads],
        log_every_n_steps=1000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, data)
    assert reads.last == 20
    return sorted(set(reads.found))


ONE_PROCESS = {
    "single_device": (lambda: SingleDeviceStrategy(), 1),
    "dp": (lambda: DataParallelStrategy(), 3),
    "balanced_dp": (lambda: BalancedDataParallelStrategy(gpu0_chunk=2), 3),
    "balanced_dp auto": (lambda: BalancedDataParallelStrategy(), 2),
    "model_parallel": (lambda: ModelParallelStrategy(), 2),
    "micro-batches": (lambda: ModelParallelStrategy(num_microbatches=3, deterministic=True), 2),
}
RANKS = {
    "ddp": (lambda: DDPStrategy(), 2),
    "ddp global": (lambda: DDPStrategy(batch_size_is="global"), 2),
    "ddp of replicas": (lambda: DDPStrategy(devices_per_process=2), 4),
    "balanced_ddp": (lambda: BalancedDDPStrategy(weights=[2, 1]), 2),
    "ddp_model_parallel": (lambda: DDPModelParallelStrategy(), 4),
    "balanced_ddp_model_parallel": (lambda: BalancedDDPModelParallelStrategy(weights=[2, 1]), 4),
}
MODULES = {"plain": LogsOnly, "number": Logs, "tensor": LogsTensorWeight}
OPTIONS: dict[str, Any] = {
    "each": {},
    "accumulated": {"accumulate_grad_batches": 2, "exact_accumulation": True, "gradient_clip_val": 1.0},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("strategy", ONE_PROCESS)
def test_ordinary_steps_read_nothing_from_the_device(strategy: str, module: str, options: str) -> None:
    make, devices = ONE_PROCESS[strategy]
    assert not reads_of(make(), MODULES[module](), devices, **OPTIONS[options])


def in_rank(strategy: str) -> list[str]:
    warnings.simplefilter("ignore")  # Lightning's advice
    make, devices = RANKS[strategy]
    found: list[str] = []
    for module in MODULES.values():
        for options in OPTIONS.values():
            found += reads_of(make(), module(), devices, **options)
    return found


@pytest.mark.parametrize("strategy", RANKS)
def test_ordinary_steps_of_ranks_read_nothing_from_the_device(strategy: str) -> None:
    assert run_ranks(in_rank, 2, strategy) == [[], []]
