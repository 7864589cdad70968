"""Layers of `configure_model` are never whole on a rank, and have the values that one device gives them."""

from pathlib import Path
from typing import Any

import torch
from distributed import run_ranks
from regression import Net, Numbered, quiet_trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.strategies import FSDPStrategy, SingleDeviceStrategy
from evener.trainer.checkpoint import Checkpoint


class Configured(Net):
    """Three large layers, the last tied to the first, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Module | None = None

    def configure_model(self) -> None:
        if self.body is None:
            self.body = nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 70), nn.Tanh(), nn.Linear(70, 3))
            self.lift = nn.Linear(3, 64)
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("mask", torch.rand(64, 64))
            nn.init.trunc_normal_(self.body[2].weight, std=0.1)
            self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        assert self.body is not None
        out = self.net(self.scale * self.body(self.lift(x) @ self.get_buffer("mask")))
        return (out - y).square().mean()


def _train(kind: str, num_ranks: int, source: Path | None, target: Path | None) -> Tensor:
    strategy = SingleDeviceStrategy() if kind == "one" else FSDPStrategy(batch_size_is="global", timeout_s=60)
    callbacks = [] if target is None else [Checkpoint(target, "{step}", every_n_steps=1, save_top_k=-1)]
    module = Configured()
    trainer = quiet_trainer(strategy, num_ranks, callbacks=callbacks, enable_checkpointing=bool(callbacks))
    torch.manual_seed(5)
    trainer.fit(module, DataLoader(Numbered(), 6), ckpt_path=source)
    return weights(module)


def test_layers_of_configure_model_are_filled_shard_by_shard(tmp_path: Path) -> None:
    expected = _train("one", 1, None, None)
    for rank in run_ranks(_train, 2, "fsdp", 2, None, tmp_path):
        torch.testing.assert_close(rank, expected, rtol=0, atol=1e-10)
    resumed = [_train("one", 1, tmp_path / "2.ckpt", None), *run_ranks(_train, 3, "fsdp", 3, tmp_path / "2.ckpt", None)]
    for found in resumed:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
