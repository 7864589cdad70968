"""TensorBoard's files have each point once, whatever ended the processes of a run before."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import TensorBoardLogger as LightningsLogger
from seen import Failing, raw_points
from tiny import quiet
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from evener.trainer import compose, train
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.loggers import TensorBoardLogger


class Fails(Failing):
    """Logs in a test, too."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", 1.0)


LOADER = DataLoader(TensorDataset(torch.ones(8, 1)), 1)


def fit(folder: Path, at: int | None = None, resume: bool = False, kind: Any = TensorBoardLogger) -> None:
    """Train 8 steps, or fail at one, with checkpoints at 3 and 6, as a process of its own would: with new objects."""
    logger = kind(folder) if kind is TensorBoardLogger else kind(folder, name="", version="")
    saver = Checkpoint(folder / "checkpoints", every_n_steps=3)
    last = folder / "checkpoints" / "last.ckpt" if resume else None
    with nullcontext() if at is None else pytest.raises(KeyError):
        quiet(logger=logger, log_every_n_steps=1, callbacks=[saver]).fit(
            Fails(at), LOADER, ckpt_path=last, weights_only=True
        )
    if kind is TensorBoardLogger:
        logger.close()


def test_a_second_fit_of_one_logger_keeps_what_was_logged_since_the_first(tmp_path: Path) -> None:
    logger = LightningsLogger(tmp_path, name="", version="")  # which begins a file for each call
    for last in (None, tmp_path / "checkpoints" / "last.ckpt"):
        saver = Checkpoint(tmp_path / "checkpoints")
        trainer = quiet(max_epochs=2 if last else 1, logger=logger, log_every_n_steps=1, callbacks=[saver])
        trainer.fit(Fails(), LOADER, ckpt_path=last, weights_only=True)
        trainer.test(Fails(), LOADER, verbose=False)
    assert steps(tmp_path) == list(range(16))
    assert steps(tmp_path, "tested") == [8, 16]


def steps(folder: Path, tag: str = "index") -> list[int]:
    return sorted(step for name, step, _ in raw_points(folder) if name == tag)


@pytest.mark.parametrize("kind", [TensorBoardLogger, LightningsLogger])
def test_points_after_the_checkpoint_are_withdrawn_however_often_a_run_dies(kind: Any, tmp_path: Path) -> None:
    for at in (5, 4, 7):  # the second dies before it has saved: what it has logged comes after step 3, too
        fit(tmp_path, at, resume=at != 5, kind=kind)
        (newest := max(tmp_path.glob("events.*"))).write_bytes(newest.read_bytes()[:-3])  # a record cut in two
    fit(tmp_path, resume=True, kind=kind)
    assert steps(tmp_path) == list(range(8))


def test_a_checkpoint_later_than_the_points_left_extends_no_file(tmp_path: Path) -> None:
    fit(tmp_path, at=5)
    (file,) = tmp_path.glob("events.*")
    file.write_bytes(file.read_bytes()[:60])
    size = file.stat().st_size
    fit(tmp_path, resume=True)
    assert file.stat().st_size == size
    assert steps(tmp_path)[-5:] == [3, 4, 5, 6, 7]


def test_files_of_others_and_of_another_run_stay(tmp_path: Path) -> None:
    fit(tmp_path / "first", at=5)
    with SummaryWriter(str(tmp_path / "first")) as own:
        own.add_scalar("index", 1.0, 100)
    (tmp_path / "second").mkdir()
    (tmp_path / "first" / "checkpoints").rename(tmp_path / "second" / "checkpoints")
    fit(tmp_path / "second", resume=True)
    assert steps(tmp_path / "first") == [0, 1, 2, 3, 4, 100]
    assert steps(tmp_path / "second") == [3, 4, 5, 6, 7]


def test_a_command_that_starts_again_before_it_has_saved_has_each_point_once(tmp_path: Path) -> None:
    words = [
        f"log_dir={tmp_path}", "accelerator=cpu", "trainer.max_epochs=1", "trainer.limit_train_batches=3",
        "resume=auto", "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false", "checkpoint=none",
        "test_after_fit=false",
    ]  # fmt: skip
    cfg = compose(words)
    run_dir = Path(train(cfg).run_dir)
    before = steps(run_dir, "train/loss")
    assert before == [0, 1, 2]
    train(cfg)
    assert steps(run_dir, "train/loss") == before
