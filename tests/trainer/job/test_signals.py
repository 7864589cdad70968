"""Signals to a run: before the first step it ends at once; afterwards it saves, says so, and ends with their status."""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from evener.trainer import Trainer
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.job.signals import Interrupted, graceful_stop


class Signalled(pl.LightningModule):
    """Sends itself a signal at a place."""

    def __init__(self, place: str, signum: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.place, self.signum = place, signum
        self.num_steps = 0

    def reach(self, place: str) -> None:
        if place == self.place:
            os.kill(os.getpid(), self.signum)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_steps += 1
        self.reach(f"step {self.trainer.global_step}")
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.reach("sanity check" if self.trainer.sanity_checking else "validation")

    def on_train_start(self) -> None:
        self.reach("train start")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = int(self.trainer.estimated_stepping_batches)  # sets up the loaders, long before the first step
        self.reach("optimizers")
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=total)]


def make_trainer(folder: Path) -> Trainer:
    return Trainer(
        callbacks=[Checkpoint(folder, interval_s=1e9)], max_epochs=2, accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def fit(trainer: Trainer, module: Signalled) -> None:
    loader = DataLoader(torch.arange(8.0)[:, None], 2)
    trainer.fit(module, loader, loader)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1, signal.SIGHUP], ids=lambda signum: signum.name)
@pytest.mark.parametrize("place", ["optimizers", "sanity check"])
def test_a_run_that_has_not_begun_ends_at_once(place: str, signum: signal.Signals, tmp_path: Path) -> None:
    module, trainer = Signalled(place, signum), make_trainer(tmp_path)
    with pytest.raises(Interrupted) as raised, graceful_stop(trainer):
        fit(trainer, module)
    assert (raised.value.code, module.num_steps) == (128 + signum, 0)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda signum: signum.name)
def test_a_run_tells_what_it_saved(signum: signal.Signals, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, trainer = Signalled("step 2", signum), make_trainer(tmp_path)
    with caplog.at_level(logging.INFO), pytest.raises(Interrupted) as raised, graceful_stop(trainer):
        fit(trainer, module)
    assert raised.value.code == 128 + signum
    assert f"Interrupted at step 3; saved {tmp_path}/last.ckpt; continue with resume=last" in caplog.text
    assert "Received SIGTERM" not in caplog.text
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM], ids=lambda signum: signum.name)
def test_a_script_saves_and_ends_with_the_signals_status(signum: signal.Signals, tmp_path: Path) -> None:
    before = signal.getsignal(signum)
    with pytest.raises(SystemExit) as raised:
        fit(make_trainer(tmp_path), Signalled("step 2", signum))
    assert raised.value.code == 128 + signum
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3
    assert signal.getsignal(signum) == before


def test_a_scripts_own_handler_is_kept(tmp_path: Path) -> None:
    received: list[int] = []
    handler: Callable[..., None] = lambda signum, frame: received.append(signum)  # noqa: E731
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        fit(make_trainer(tmp_path), Signalled("step 2", signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]


def test_a_run_that_outlives_its_terminal_does_not_hear_it_close(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        trainer, module = make_trainer(tmp_path), Signalled("step 2", signal.SIGHUP)
        with graceful_stop(trainer):
            fit(trainer, module)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert module.num_steps == 8
