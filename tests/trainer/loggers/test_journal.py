"""`metrics.csv` and event files have each row and point once, however many processes write, and whatever ended them."""

import csv
import errno
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from launching import running
from pytorch_lightning.loggers import CSVLogger as LightningsCSV
from pytorch_lightning.loggers import TensorBoardLogger as LightningsTensorBoard
from seen import Failing, raw_points
from tiny import quiet
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from evener.trainer import compose, train
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.loggers import CSVLogger, TensorBoardLogger
from evener.trainer.loggers.journal import MetricsFile

SCRIPT = Path(__file__).parents[2] / "support" / "logging_script.py"
LOADER = DataLoader(TensorDataset(torch.ones(8, 1)), 1)


class Fails(Failing):
    """Logs a step number of its own to CSV files, whose rows are counted, and in a test, too."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if isinstance(self.logger, LightningsCSV):
            self.log("step", 1000.0)
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", 1.0)


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The rows of the only metrics.csv under a folder, without empty cells."""
    (path,) = folder.rglob("metrics.csv")
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def steps(folder: Path, tag: str = "index") -> list[int]:
    """The steps at which a value was logged: in a CSV file by row, in event files in order."""
    if any(folder.rglob("metrics.csv")):
        return [int(float(row[tag])) for row in rows_of(folder)]
    return sorted(step for name, step, _ in raw_points(folder) if name == tag)


def fit(folder: Path, kind: Any, at: int | None = None, resume: bool = False, logger: Any = None) -> list[int]:
    """Train 8 steps, or fail at one, with checkpoints at 3 and 6, as a process of its own would: with new objects."""
    own = logger or (kind(folder) if kind is TensorBoardLogger else kind(folder, name="", version=""))
    trainer = quiet(logger=own, log_every_n_steps=1, callbacks=[Checkpoint(folder / "checkpoints", every_n_steps=3)])
    last = folder / "checkpoints" / "last.ckpt" if resume else None
    with nullcontext() if at is None else pytest.raises(KeyError):
        trainer.fit(Fails(at), LOADER, ckpt_path=last, weights_only=True)
    if kind is TensorBoardLogger:
        own.close()
    return [] if at else steps(folder)


@pytest.mark.parametrize("kind", [CSVLogger, LightningsCSV, TensorBoardLogger, LightningsTensorBoard])
def test_what_follows_the_checkpoint_is_withdrawn_however_often_a_run_dies(kind: Any, tmp_path: Path) -> None:
    for at in (5, 4, 7):  # the second dies before it has saved: what it has logged comes after step 3, too
        fit(tmp_path, kind, at, resume=at != 5)
        files = [path for pattern in ("events.*", "metrics.csv") for path in tmp_path.glob(pattern)]
        (newest := max(files)).write_bytes(newest.read_bytes()[:-3])  # a record cut in two
    assert fit(tmp_path, kind, resume=True) == list(range(8))


def test_a_run_that_starts_anew_replaces_the_rows_of_an_earlier_one_and_a_second_fit_does_not(tmp_path: Path) -> None:
    fit(tmp_path, CSVLogger, at=5)
    logger = CSVLogger(tmp_path, name="", version="")
    assert fit(tmp_path, CSVLogger, logger=logger) == list(range(8))
    assert fit(tmp_path, CSVLogger, logger=logger) == [*range(8), *range(8)]


def test_a_second_fit_of_one_logger_keeps_what_was_logged_since_the_first(tmp_path: Path) -> None:
    logger = LightningsTensorBoard(tmp_path, name="", version="")  # which begins a file for each call
    for last in (None, tmp_path / "checkpoints" / "last.ckpt"):
        saver = Checkpoint(tmp_path / "checkpoints")
        trainer = quiet(max_epochs=2 if last else 1, logger=logger, log_every_n_steps=1, callbacks=[saver])
        trainer.fit(Fails(), LOADER, ckpt_path=last, weights_only=True)
        trainer.test(Fails(), LOADER, verbose=False)
    assert steps(tmp_path) == list(range(16))
    assert steps(tmp_path, "tested") == [8, 16]


def test_files_of_others_and_of_another_run_stay(tmp_path: Path) -> None:
    fit(tmp_path / "first", TensorBoardLogger, at=5)
    with SummaryWriter(str(tmp_path / "first")) as own:
        own.add_scalar("index", 1.0, 100)
    (tmp_path / "second").mkdir()
    (tmp_path / "first" / "checkpoints").rename(tmp_path / "second" / "checkpoints")
    assert fit(tmp_path / "second", TensorBoardLogger, resume=True) == [3, 4, 5, 6, 7]
    assert steps(tmp_path / "first") == [0, 1, 2, 3, 4, 100]


def test_a_command_that_starts_again_before_it_has_saved_has_each_point_once(tmp_path: Path) -> None:
    words = [
        f"log_dir={tmp_path}", "accelerator=cpu", "trainer.max_epochs=1", "trainer.limit_train_batches=3",
        "resume=auto", "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false", "checkpoint=none",
        "test_after_fit=false",
    ]  # fmt: skip
    cfg = compose(words)
    for _ in range(2):
        assert steps(Path(train(cfg).run_dir), "train/loss") == [0, 1, 2]


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


def test_a_new_column_is_put_in_order_and_a_full_disk_leaves_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lightning's writer truncates the file first; and of the columns that were not written there were values later.
    file = MetricsFile(str(tmp_path))
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
