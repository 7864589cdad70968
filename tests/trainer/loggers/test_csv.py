"""`metrics.csv` has every row once, however many processes write it."""

import csv
import errno
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import warm_python
from launching import running
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.loggers import CSVLogger as LightningsCSVLogger
from seen import Failing
from tiny import Points, quiet
from torch.utils.data import DataLoader, TensorDataset

from evener.trainer.checkpoint import Checkpoint
from evener.trainer.loggers import CSVLogger
from evener.trainer.loggers.journal import MetricsFile

SCRIPT = Path(__file__).parents[2] / "support" / "logging_script.py"


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The rows of the only metrics.csv under a folder, without empty cells."""
    (path,) = folder.rglob("metrics.csv")
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def run_script(*arguments: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = warm_python.run(SCRIPT, *arguments, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [("ddp", "lightnings"), ("ddp", "lightnings", "version", "used"), ("ddp", "version", "used"), ("single_device",)],
    ids=" ".join,
)
def test_a_script_of_several_calls_has_the_rows_of_all_in_one_file(tmp_path: Path, options: tuple[str, ...]) -> None:
    # The logger of the script knew nothing of what the forked ranks had written: the next call's ranks chose another
    # directory, or deleted the file of the given one, or failed with "dict contains fields not in fieldnames".
    run_script(str(tmp_path), *options)
    rows = rows_of(tmp_path)
    if "used" in options:
        assert rows.pop(0) == {"step": "0", "before": "7.0"}
    # x = 1 and s = w + b: the loss is (s - 3)², and each step multiplies s - 3 by 1 - 2 · 2 · 0.1 = 0.6
    losses = [9 * 0.36**n for n in range(8)]
    found = [float(row.get("train") or row.get("test") or row["between"]) for row in rows]
    assert found == pytest.approx([*losses[:4], losses[4], 8.0, *losses[4:]], rel=1e-5)
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 0, 4, 0, 1, 2, 3]


@pytest.mark.slow
def test_an_elastic_restart_loses_and_repeats_no_row(tmp_path: Path) -> None:
    # Lightning's logger deleted the rows that the first workers had written.
    with running(
        tmp_path, "++module.fault=kill", f"++module.once={tmp_path}/once", "launcher.max_restarts=1", "logger=csv",
        "checkpoint=every_n_steps", "checkpoint.every_n_steps=2", "trainer.max_epochs=1", "trainer.log_every_n_steps=1",
        "logger.csv.flush_logs_every_n_steps=1",
    ) as run:  # fmt: skip
        assert run.wait(300) == 0, run.output.read_text()
    assert [int(row["step"]) for row in rows_of(tmp_path) if "val/loss" in row] == list(range(64))


class Fails(Failing):
    """Logs a step number of its own, too."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("step", 1000.0)
        return super().training_step(batch, batch_idx)


def train(folder: Path, at: int | None = None, resume: bool = False, logger: Any = None) -> list[int]:
    """Train 8 steps, or fail at one, as a process of its own would: with new objects; return the rows' values."""
    logger = logger or CSVLogger(folder, name="csv", version="")
    saver = Checkpoint(folder / "checkpoints", every_n_steps=3)
    trainer = quiet(logger=logger, log_every_n_steps=1, callbacks=[saver])
    last = folder / "checkpoints" / "last.ckpt" if resume else None
    with nullcontext() if at is None else pytest.raises(KeyError):
        trainer.fit(Fails(at), DataLoader(TensorDataset(torch.ones(8, 1)), 1), ckpt_path=last, weights_only=True)
    return [int(float(row["index"])) for row in rows_of(folder)]


@pytest.mark.parametrize("torn", [False, True])
def test_a_resumed_run_continues_after_the_rows_of_its_checkpoint(torn: bool, tmp_path: Path) -> None:
    # by number of rows: the step of a row may be the module's own
    assert train(tmp_path, at=5) == [0, 1, 2, 3, 4]
    if torn:
        (path,) = tmp_path.rglob("metrics.csv")
        path.write_bytes(path.read_bytes()[:-4])
    assert train(tmp_path, resume=True) == list(range(8))


def test_a_run_that_starts_anew_replaces_the_rows_of_an_earlier_one_and_a_second_fit_does_not(tmp_path: Path) -> None:
    train(tmp_path, at=5)
    logger = CSVLogger(tmp_path, name="csv", version="")
    assert train(tmp_path, logger=logger) == list(range(8))
    assert train(tmp_path, logger=logger) == [*range(8), *range(8)]


def test_lightnings_own_logger_continues_after_a_restart_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for restarts in ("0", "1"):
        folder = tmp_path / restarts
        train(folder, at=5, logger=LightningsCSVLogger(folder, name="csv", version=""))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        with pytest.warns(UserWarning, match="will be deleted") if restarts == "0" else nullcontext():
            found = train(folder, resume=True, logger=LightningsCSVLogger(folder, name="csv", version=""))
        assert found == ([3, 4, 5, 6, 7] if restarts == "0" else list(range(8)))


def test_a_new_column_is_put_in_order_and_a_full_disk_leaves_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lightning's writer truncates the file first; and of the columns that were not written there were values later.
    file = MetricsFile(str(tmp_path), keep=True)
    file.log_metrics({"loss": 0.5}, step=0)
    file.save()
    file.log_metrics({"accuracy": 0.75}, step=1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(file._fs, "mv", full)
        with pytest.raises(OSError, match="No space left"):
            file.save()
    assert (tmp_path / "metrics.csv").read_text().split() == ["loss,step", "0.5,0"]
    file.save()
    assert (tmp_path / "metrics.csv").read_text().split() == ["accuracy,loss,step", ",0.5,0", "0.75,,1"]


class SwitchedOff(Points):
    """A tracker that is switched off: its experiment takes every call, and has every attribute."""

    experiment = _experiment = Mock()  # as loggers of Lightning keep it


def test_an_experiment_that_has_every_attribute_is_no_file_of_rows() -> None:
    trainer = quiet(logger=SwitchedOff(), max_steps=2)
    trainer.fit(BoringModel())
    assert trainer.global_step == 2
