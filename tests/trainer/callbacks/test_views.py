"""What people see: the dashboard's data, the start-up block, the lines of epochs."""

import io
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from seen import SHORT, events
from tiny import Points, Tiny, quiet
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from evener.strategies import BalancedDataParallelStrategy, BalancedDDPModelParallelStrategy
from evener.trainer import Result, compose, train
from evener.trainer.callbacks import EpochLines, GradientNorm
from evener.trainer.callbacks.start_up import batch_line
from evener.trainer.job import run as run_module
from evener.trainer.job.log_file import run_log
from evener.trainer.job.result import short_path, show_summary


class Line(Tiny):
    """y = w·x with loss w·mean(x): the gradient of each weight is the mean of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, bias=False)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch[0]).mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.tensor([[3.0, 4.0]] * 8)), batch_size=4)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Two epochs of six steps on two replicas, logged every second step, with the gradient's norm."""
    options = ["strategy=dp", "devices=2", "callbacks=gradient_norm", "trainer.limit_train_batches=6"]
    home = f"log_dir={tmp_path_factory.mktemp('logs')}"
    return train(compose([*SHORT, home, *options, "trainer.max_epochs=2", "trainer.log_every_n_steps=2"]))


def test_speed_has_a_point_per_log_point(digits: Result) -> None:
    log = events(digits)
    for name in ("samples_per_s", "step_ms", "data_wait_ms"):
        points = log.Scalars(f"speed/{name}")
        assert [point.step for point in points] == [1, 3, 5, 7, 9, 11]
        assert all(point.value > 0 for point in points)
    step, wait = (log.Scalars(f"speed/{name}") for name in ("step_ms", "data_wait_ms"))
    assert all(part.value < whole.value * 1.001 for whole, part in zip(step, wait, strict=True))
    for speed, time in zip(log.Scalars("speed/samples_per_s"), step, strict=True):
        assert speed.value * time.value / 1000 == pytest.approx(64, rel=1e-4)


def test_devices_have_a_point_per_epoch(digits: Result) -> None:
    log = events(digits)
    assert [(point.step, point.value) for point in log.Scalars("balance/share_1")] == [(5, 0.5), (11, 0.5)]
    memory = [point.value for point in log.Scalars("device/peak_memory_mib_0")]
    assert len(memory) == 2
    assert 50 < memory[0] <= memory[1] == pytest.approx(digits.peak_memory_mib[0], rel=0.05)


def test_the_start_up_block_tells_what_will_run(digits: Result) -> None:
    text = (Path(digits.run_dir) / "train.log").read_text()
    block = text[text.index("  strategy ") :].splitlines()[:8]
    assert [tuple(re.split("  +", line.strip())) for line in block] == [
        ("strategy", "dp"),
        ("devices", "2 × cpu"),
        ("processes", "1"),
        ("global batch", "64 = 2 replicas × 32 samples"),
        ("precision", "32-true"),
        ("parameters", "38,282"),
        ("checkpoints", "the best by val/loss (min) and the last, every epoch"),
        ("run directory", digits.run_dir),
    ]
    assert "GPU available" not in text


def test_without_a_terminal_an_epoch_is_one_line(digits: Result) -> None:
    text = (Path(digits.run_dir) / "train.log").read_text()
    lines = re.findall(r"epoch \d.*", text)
    assert len(lines) == 2
    (value,) = re.findall(r"val/loss ([\d.]+)", lines[1])
    assert float(value) == pytest.approx(digits.metrics["val/loss"], rel=1e-3)
    assert lines[0].startswith("epoch 0/1 · step 6 · ")  # counted as in the names of checkpoints


def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = "+callbacks.bar._target_=pytorch_lightning.callbacks.TQDMProgressBar"
    cfg = compose(["accelerator=cpu", f"run_dir={tmp_path}", own])
    for terminal in (True, False):
        console = SimpleNamespace(is_terminal=terminal, is_jupyter=False)
        monkeypatch.setattr(run_module, "Console", lambda console=console: console)
        trainer = run_module.build(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))).trainer
        assert (trainer.progress_bar_callback is not None) is terminal
        assert any(isinstance(callback, EpochLines) for callback in trainer.callbacks)


def test_an_epoch_line_shows_the_means_of_its_own_epoch(caplog: pytest.LogCaptureFixture) -> None:
    class Means(Line):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            self.log("mean", float(10 * self.current_epoch + batch_idx), on_step=False, on_epoch=True, prog_bar=True)
            return self.layer(batch[0]).mean()

    with caplog.at_level(logging.INFO, logger="evener"):
        quiet(max_epochs=2, callbacks=[EpochLines()]).fit(Means())
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch")]
    assert [line.rsplit(" · ", 1)[1] for line in told] == ["mean 0.5", "mean 10.5"]


def test_the_gradient_norm_is_the_unclipped_one() -> None:
    logger = Points()
    quiet(logger=logger, log_every_n_steps=1, gradient_clip_val=0.1, callbacks=[GradientNorm()]).fit(Line())
    assert logger.of("gradient/norm") == [(0, pytest.approx(5.0)), (1, pytest.approx(5.0))]  # of (3, 4)


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        # an IndexError: the stages of a lone process were taken for replicas, among which the policy cuts
        (BalancedDDPModelParallelStrategy(model_parallel_size=2, weights=[1.0]), "4 samples"),
        (BalancedDataParallelStrategy(weights=[1, 3]), "4 = 1 + 3 samples on 2 replicas"),
    ],
)
def test_the_batch_line_counts_accumulation_and_uneven_chunks(strategy: Any, told: str, tmp_path: Path) -> None:
    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            (tmp_path / "told").write_text(batch_line(trainer))

    module = Line()
    module.layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))  # type: ignore[assignment]
    quiet(strategy=strategy, devices=2, accumulate_grad_batches=2, callbacks=[Look()]).fit(module)
    assert (tmp_path / "told").read_text() == f"{told}; an optimizer step takes 2 of them, 8 samples"


def test_the_closing_table_is_whole_at_80_columns_and_shows_what_was_logged_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir := tmp_path / ("long" * 20)).mkdir()
    metrics = {"train/loss": 0.5, "train/loss_epoch": 0.5, "train/loss_step": 0.4, "val/acc": 0.25, "lr-Adam": 0.1}
    result = Result("fit", "dp", [f"cuda:{i}" for i in range(10)], 1, str(run_dir), metrics)
    show_summary(result)
    told = capsys.readouterr().out.splitlines()
    table = [line for line in told if line.startswith("│")]
    assert {len(line) for line in table} == {80}
    assert [line.split()[1] for line in table] == ["strategy", "devices", "│", "train/loss", "val/acc"]
    assert told[-1] == f"run directory  {short_path(str(run_dir))}", "a path that is cut can't be pasted"
    assert not any("tensorboard --logdir" in line for line in told)
    SummaryWriter(str(run_dir)).close()  # which has something to show
    show_summary(result)
    assert "tensorboard --logdir logs" in capsys.readouterr().out


def test_a_line_goes_to_the_output_that_a_bar_has_put_in_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with run_log(tmp_path):
        monkeypatch.setattr(sys, "stdout", above := io.StringIO())
        logging.getLogger("evener").info("epoch 0")
    assert above.getvalue() == "epoch 0\n"
