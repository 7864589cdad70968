"""A script guarded by `__main__`, whose processes are not forked from it: they only import it."""

import os
import resource
import sys
import time
import warnings

import tiny
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import DDPStrategy

warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


class Line(tiny.Line):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.ParameterList(nn.Parameter(torch.ones(1), requires_grad=False) for _ in range(300))

    def on_train_batch_start(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        if "sleep" in sys.argv:  # on each rank, once the verifier has looked at the step
            write(str(os.getpid()))
            time.sleep(600)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss


def write(line: str) -> None:
    with open(sys.argv[1], "a") as file:
        file.write(f"{line}\n")


def fit() -> None:
    write("before")
    loader = DataLoader(TensorDataset(torch.linspace(-1, 1, 32)[:, None]), 4)
    module = Line()
    strategy = DDPStrategy(timeout_s=120, start_method=sys.argv[2])
    trainer = tiny.quiet(strategy=strategy, devices=2, max_epochs=20, enable_progress_bar=True)
    trainer.fit(module, loader)
    write(f"after {module.layer.weight.item():.2f} {float(trainer.callback_metrics['loss']):.4f}")


if __name__ == "__main__":
    fit()
