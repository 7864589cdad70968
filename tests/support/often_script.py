"""A plain script that fits three times under ddp, and prints how many files are open after each."""

import gc
import os
import sys

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from evener.trainer import Trainer


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


gc.disable()
for _ in range(3):
    trainer = Trainer(
        strategy="ddp", devices=2, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(4, 1)), 2))
    del trainer
    sys.stdout.write(f"{len(os.listdir('/proc/self/fd'))}\n")
