"""A run that has finished, or was to stop, when it was saved does so when it is resumed."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping
from tiny import Tiny, quiet
from torch.utils.data import DataLoader

from evener.trainer import Trainer
from evener.trainer.checkpoint import Checkpoint


class Flat(Tiny):
    """Its validation loss never gets better."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[int] = []
        self.epoch_ends: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained.append(self.trainer.global_step)
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", 1.0)

    def on_train_epoch_end(self) -> None:
        self.epoch_ends.append(self.trainer.current_epoch)


def fit(folder: Path, resume: Path | None = None, **options: Any) -> tuple[Flat, Trainer]:
    module = Flat()
    loader = DataLoader(torch.arange(8.0)[:, None], 2)
    saver = Checkpoint(folder, interval_s=0, save_top_k=-1, filename="{step}", save_last=True)
    callbacks = [EarlyStopping("loss", patience=2), saver]
    trainer = quiet(callbacks=callbacks, num_sanity_val_steps=0, **{"max_epochs": 9, **options})
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return module, trainer


def test_a_run_that_stopped_early_trains_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, _ = fit(tmp_path)
    assert module.epoch_ends == [0, 1, 2]
    with caplog.at_level(logging.INFO):
        resumed, trainer = fit(tmp_path, tmp_path / "last.ckpt")
    assert resumed.trained == []
    assert (trainer.global_step, trainer.current_epoch) == (12, 3)
    assert trainer.callback_metrics["loss"] == 1.0
    assert "has finished, at step 12 (it was stopped early): nothing is left to train" in caplog.text


def test_an_epoch_that_was_to_be_the_last_is_ended(tmp_path: Path) -> None:
    # saved after the third validation, within an epoch of two
    module, _ = fit(tmp_path, val_check_interval=2)
    assert (module.trained[-1], module.epoch_ends) == (5, [0, 1])
    (tmp_path / "last.ckpt").unlink()
    resumed, trainer = fit(tmp_path, tmp_path / "6.ckpt", val_check_interval=2)
    assert (resumed.trained, resumed.epoch_ends) == ([], [1])
    assert trainer.global_step == 6


def test_a_run_that_reached_max_epochs_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, max_epochs=1)
    with caplog.at_level(logging.INFO):
        resumed, _ = fit(tmp_path, tmp_path / "last.ckpt", max_epochs=1)
    assert resumed.trained == []
    assert "has finished, at step 4 (max_epochs or max_steps is reached)" in caplog.text


def test_a_run_that_was_out_of_time_goes_on_with_more(tmp_path: Path) -> None:
    module, _ = fit(tmp_path, max_time={"milliseconds": 30}, max_epochs=1)
    assert len(module.trained) < 4
    resumed, _ = fit(tmp_path, tmp_path / "last.ckpt", max_time={"hours": 1}, max_epochs=1)
    assert len(module.trained) + len(resumed.trained) == 4
