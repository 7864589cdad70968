"""strategy.recompute under ranks: whole copies, shards, and stages of ranks train as one device does."""

from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from regression import Net, Numbered, quiet_trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.strategies import DDPModelParallelStrategy, DDPStrategy, FSDPStrategy, SingleDeviceStrategy

STRATEGIES: dict[str, Any] = {
    "ddp": (2, DDPStrategy),
    "ddp of two replicas": (4, partial(DDPStrategy, devices_per_process=2)),
    "ddp_model_parallel": (4, partial(DDPModelParallelStrategy, num_microbatches=2)),
    "fsdp": (2, FSDPStrategy),
    "fsdp of blocks": (2, partial(FSDPStrategy, shard=["net.0", "net.1", "net.2.first"])),
    "fsdp that keeps parts": (2, partial(FSDPStrategy, reshard_after_forward=False)),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Blocks(Net):
    def __init__(self) -> None:
        super().__init__()
        chain = [layer for _ in range(4) for layer in (nn.Linear(3, 3), nn.Tanh())]
        self.net = nn.Sequential(Block(), Block(), Block(), nn.Sequential(*chain), nn.Linear(3, 1)).double()


def train(strategy: Any, num_devices: int) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    module = Blocks()
    trainer = quiet_trainer(strategy, num_devices, accumulate_grad_batches=2, gradient_clip_val=0.3)
    trainer.fit(module, DataLoader(Numbered(), 5), DataLoader(Numbered(), 5))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": weights(module), "metrics": metrics}


def train_all() -> dict[str, dict[str, Any]]:
    """Train under every strategy, on the two ranks."""
    found = {}
    for name, (num_devices, strategy) in STRATEGIES.items():
        options: dict[str, Any] = {"batch_size_is": "global", "timeout_s": 60, "recompute": "always"}
        found[name] = train(strategy(**options), num_devices)
    return found


@pytest.mark.slow
def test_two_ranks_train_as_one_device() -> None:
    expected = train(SingleDeviceStrategy(), 1)
    for found in run_ranks(train_all, 2, timeout_s=240):
        for name, run in found.items():
            torch.testing.assert_close(run["weights"], expected["weights"], rtol=0, atol=1e-10, msg=name)
            assert run["metrics"] == pytest.approx(expected["metrics"], abs=1e-6), name
