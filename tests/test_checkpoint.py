"""Checkpoints: names, which files are kept, and finding the newest."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import ConfigError
from evener.trainer import Trainer
from evener.trainer.checkpoint import Checkpoint, find_newest
from evener.trainer.checkpoint_io import write

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "devices": 1,
    "strategy": "single_device",
    "limit_val_batches": 1,
}


class Falling(pl.LightningModule):
    """`val/loss` of the epochs is what it is told."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.scores = scores

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.scores[self.current_epoch])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)

    val_dataloader = train_dataloader


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_names_are_valid_overrides_and_a_metric_with_a_slash_makes_no_directory(tmp_path: Path) -> None:
    callback = Checkpoint(tmp_path, "{epoch}-val={val/loss:.2f}", monitor="val/loss")
    Trainer(max_epochs=1, callbacks=[callback], **QUIET).fit(Falling([0.5]))
    assert names(tmp_path) == ["0-val_0.50.ckpt", "last.ckpt"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names(tmp_path))


def test_best_k_are_kept_by_score(tmp_path: Path) -> None:
    callback = Checkpoint(tmp_path, monitor="val/loss", save_top_k=2)
    Trainer(max_epochs=4, callbacks=[callback], **QUIET).fit(Falling([0.5, 0.2, 0.9, 0.4]))
    assert names(tmp_path) == ["epoch001-step000004.ckpt", "epoch003-step000008.ckpt", "last.ckpt"]
    assert callback.best_model_path == str(tmp_path / "epoch001-step000004.ckpt")
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 8


def test_two_triggers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"every_n_steps=3 and interval_s=2\.0 were given"):
        Checkpoint(every_n_steps=3, interval_s=2.0)


def test_find_newest_looks_through_all_runs_of_an_experiment(tmp_path: Path) -> None:
    assert find_newest(tmp_path) is None
    for time, name in [(10, "a/checkpoints/last.ckpt"), (30, "b/checkpoints/last.ckpt"), (20, "c/checkpoints/x.ckpt")]:
        path = tmp_path / name
        write({"state_dict": {}}, path)
        os.utime(path, (time, time))
    assert find_newest(tmp_path) == tmp_path / "b/checkpoints/last.ckpt"
