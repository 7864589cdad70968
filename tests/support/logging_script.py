"""A plain script that calls fit, test and fit with one CSV logger; its arguments are the directory and options."""

import sys

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger as LightningsCSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evener.trainer import Trainer
from evener.trainer.loggers import CSVLogger

home, strategy, *options = sys.argv[1:]


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return (self.layer(batch[0]) - 3 * batch[0]).square().mean()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train", loss)
        return loss

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer() -> Trainer:
    return Trainer(
        strategy=strategy, devices=2 if strategy == "ddp" else 1, accelerator="cpu", max_epochs=1, logger=logger,
        log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


# every rank has the same samples, so that ddp logs what one device does
loader = DataLoader(TensorDataset(torch.ones(8 if strategy == "ddp" else 4, 1)), 1)
module = Line()
version = {"version": "v"} if "version" in options else {}
logger = (LightningsCSVLogger if "lightnings" in options else CSVLogger)(home, name="csv", **version)
if "used" in options:
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"before": 7.0}, step=0)
make_trainer().fit(module, loader)
make_trainer().test(module, loader, verbose=False)
logger.log_metrics({"between": 8.0}, step=4)
make_trainer().fit(module, loader)
