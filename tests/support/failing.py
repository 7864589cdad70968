"""A module that fails at a step, for tests of what loggers keep."""

from typing import Any

import pytorch_lightning as pl
import torch


class Failing(pl.LightningModule):
    """Logs its step's number, and fails at a step."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == self.at:
            raise KeyError("enough")
        self.log("index", float(self.trainer.global_step))
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
