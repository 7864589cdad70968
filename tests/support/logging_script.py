"""A plain script that calls fit, test and fit with one CSV logger; its arguments are the directory and options."""

import sys

import tiny
import torch
from pytorch_lightning.loggers import CSVLogger as LightningsCSVLogger
from torch.utils.data import DataLoader, TensorDataset

from evener.trainer import Trainer
from evener.trainer.loggers import CSVLogger

home, strategy, *options = sys.argv[1:]


class Line(tiny.Line):
    lr = 0.1

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train", loss)
        return loss

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)


def make_trainer() -> Trainer:
    return tiny.quiet(strategy=strategy, devices=2 if strategy == "ddp" else 1, logger=logger, log_every_n_steps=1)


# every rank has the same samples, so that ddp logs what one device does
loader = DataLoader(TensorDataset(torch.ones(8 if strategy == "ddp" else 4, 1)), 1)
module = Line()
for parameter in module.parameters():
    torch.nn.init.zeros_(parameter)
version = {"version": "v"} if "version" in options else {}
logger = (LightningsCSVLogger if "lightnings" in options else CSVLogger)(home, name="csv", **version)
if "used" in options:
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"before": 7.0}, step=0)
make_trainer().fit(module, loader)
make_trainer().test(module, loader, verbose=False)
logger.log_metrics({"between": 8.0}, step=4)
make_trainer().fit(module, loader)
