"""Checkpoints: names, which files are kept, none with nan as the best, and finding the newest."""

import os
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from tiny import Scored, quiet
from torch import nan
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import ConfigError
from evener.trainer.checkpoint._callback import Checkpoint
from evener.trainer.checkpoint.file_io import CheckpointError, find_best, find_newest, good_or_newest, read, write


def fit(module: Scored, *callbacks: Any, resume: Path | None = None, **options: Any) -> None:
    """Train for as many epochs as there are scores."""
    given = {"max_epochs": len(module.scores), "limit_val_batches": 1, **options}
    quiet(callbacks=list(callbacks), **given).fit(module, ckpt_path=resume, weights_only=True)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def step_of(path: Path | str) -> int:
    return read(path)["global_step"]


BARE = {"state_dict": {}, "pytorch-lightning_version": "2"}
BEST_2 = ["epoch001-step000004", "epoch003-step000008"]


class Damaged(Scored):
    """From an epoch on its steps leave nan in the weights."""

    def __init__(self, scores: list[float], damaged_from: int) -> None:
        super().__init__(scores)
        self.damaged_from = damaged_from

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (nan if self.current_epoch >= self.damaged_from else 1.0)


RANKED = {"monitor": "val/loss", "filename": "{epoch}"}
POLICIES: dict[str, tuple[Scored, dict[str, Any], list[str]]] = {
    "the best by score": (Scored([0.5, 0.2, 0.9, 0.4]), {"monitor": "val/loss", "save_top_k": 2}, BEST_2),
    "in the background": (
        Scored([0.5, 0.2, 0.9, 0.4]),
        {"monitor": "val/loss", "save_top_k": 2, "async": True, "on_error": "raise"}, BEST_2,
    ),
    "steps are counted over epochs": (
        Scored([0.0] * 3), {"every_n_steps": 3, "save_top_k": -1}, ["epoch002-step000006", "epoch001-step000003"]
    ),
    # names are valid overrides, and a metric with a slash makes no directory
    "names with values": (Scored([0.5]), {**RANKED, "filename": "{epoch}-val={val/loss:.2f}"}, ["0-val_0.50"]),
    # a state with nan is never the best; Lightning takes a score that is nan for the worst number, the best of one
    "a score is nan, max": (Scored([nan, 0.5, nan]), {**RANKED, "mode": "max", "save_top_k": 2}, ["1"]),
    "every score is nan": (Scored([nan, nan]), RANKED, []),
    # an accuracy stays a number: the arg max of nan is the first class
    "weights are nan": (Damaged([0.3, 0.9, 0.9], 1), {**RANKED, "mode": "max", "save_top_k": 3}, ["0"]),
    "weights are nan, without a score": (Damaged([0.0, 0.0, 0.0], 2), {"filename": "{epoch}"}, ["1"]),
    "a score is nan, and all are kept": (Scored([nan, 0.5, nan]), {**RANKED, "save_top_k": -1}, ["1", "0", "2"]),
}  # fmt: skip
"""The module, the options, and the names of the files that are kept, the best one first."""


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_keeps_its_files(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, options, kept = POLICIES[name]
    callback = Checkpoint(tmp_path, **options)
    assert callback._background is ("async" in options)
    fit(module, callback)
    assert {path.stem for path in tmp_path.iterdir()} == {"last", *kept}
    assert Path(callback.best_model_path).stem == (kept[0] if kept else "")
    assert step_of(tmp_path / "last.ckpt") == 2 * len(module.scores)
    for path in (tmp_path / f"{stem}.ckpt" for stem in kept):
        is_last = step_of(path) == 2 * len(module.scores)
        assert os.path.samefile(path, tmp_path / "last.ckpt") == is_last, "the last takes no room of its own"
    assert caplog.text.count("val/loss is nan, so this state is not kept as one of the best") == (nan in module.scores)


def test_a_metric_of_later_validations_is_waited_for_and_two_triggers_are_refused(tmp_path: Path) -> None:
    callback = Checkpoint(tmp_path, monitor="val/loss", every_n_epochs=1)
    fit(Scored([9, 0.4, 9, 0.5]), callback, check_val_every_n_epoch=2)
    assert names(tmp_path) == ["epoch001-step000004.ckpt", "last.ckpt"]
    with pytest.raises(ConfigError, match=r"at most one trigger, got every_n_steps=3 and interval_s=2\.0"):
        Checkpoint(every_n_steps=3, interval_s=2.0)
    with pytest.raises(ConfigError, match=r"on_error is no longer there\. Leave it out: a checkpoint that can't be"):
        Checkpoint(on_error="warn")


def test_of_all_runs_the_newest_file_and_the_lowest_score_of_the_newest_run_that_has_one(tmp_path: Path) -> None:
    assert find_newest(tmp_path) is find_best(tmp_path) is None
    for run, losses in [("old", [0.1, 0.6]), ("new", [0.5, 0.2, 0.9])]:
        fit(Scored(losses), Checkpoint(tmp_path / run, monitor="val/loss"))
    write(BARE, tmp_path / "unranked" / "last.ckpt")
    assert find_newest(tmp_path) == tmp_path / "unranked" / "last.ckpt"
    assert find_best(tmp_path) == tmp_path / "new" / "epoch001-step000004.ckpt"
    (tmp_path / "new").rename(tmp_path / "moved")
    assert find_best(tmp_path) == tmp_path / "moved" / "epoch001-step000004.ckpt"
    (tmp_path / "moved" / "epoch001-step000004.ckpt").write_bytes(b"cut short")
    assert find_best(tmp_path) == tmp_path / "old" / "epoch000-step000002.ckpt"


class Noisy(Scored):
    """A score that depends on the weights only, and training of 4 batches that changes them."""

    def __init__(self) -> None:
        super().__init__([])
        self.validated: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", (self.layer(batch[0]) - 1).abs().mean())

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["val/loss"]))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)


TRIGGERS: dict[str, dict[str, Any]] = {
    "steps": {"every_n_steps": 3},
    "epochs": {"every_n_epochs": 1},
    "time": {"interval_s": 0.0},
}


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("val_check_interval", [0.5, 1.0])
def test_the_best_file_is_the_model_that_scored_and_last_is_always_the_newest(
    trigger: str, val_check_interval: float, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []

    class Look(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            if files := list(tmp_path.glob("*.ckpt")):
                seen.append((step_of(tmp_path / "last.ckpt"), max(map(step_of, files))))

    torch.manual_seed(1)
    callback, model = Checkpoint(tmp_path, monitor="val/loss", save_top_k=-1, **TRIGGERS[trigger]), Noisy()
    options: dict[str, Any] = {"num_sanity_val_steps": 0, "val_check_interval": val_check_interval}
    fit(model, callback, Look(), max_epochs=3, **options)
    assert seen
    assert all(last == newest for last, newest in seen)
    assert step_of(callback.last_model_path) == 12
    validator, scored = quiet(callbacks=[callback], limit_val_batches=1), list(model.validated)
    validator.validate(model, ckpt_path=callback.best_model_path, verbose=False)
    assert float(validator.callback_metrics["val/loss"]) == float(callback.best_model_score or 0) == min(scored)
    assert len(set(scored)) > 2


def test_the_best_score_survives_a_resume_into_a_new_directory_with_another_trigger(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    fit(Scored([0.3, 0.1]), Checkpoint(old, monitor="val/loss", save_top_k=2, every_n_epochs=1))
    before = {path: path.read_bytes() for path in old.iterdir()}
    second = Checkpoint(new, monitor="val/loss", save_top_k=2, every_n_steps=2)
    fit(Scored([0.3, 0.1, 0.9, 0.2, 0.8]), second, resume=old / "last.ckpt")
    assert second.best_model_path == str(old / "epoch001-step000004.ckpt")
    assert float(second.best_model_score or 0) == pytest.approx(0.1)
    assert {path: path.read_bytes() for path in old.iterdir()} == before
    assert names(new) == ["epoch003-step000008.ckpt", "last.ckpt"]


def test_a_typo_in_monitor_fails_by_the_first_validation_with_a_usable_file(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=5, callbacks=[Checkpoint(tmp_path, monitor="val/los")])
    with pytest.raises(ConfigError, match=r"monitor=val/los was not logged. Logged so far: val/loss\."):
        trainer.fit(Noisy())
    assert trainer.global_step == 4
    assert find_newest(tmp_path) == tmp_path / "last.ckpt"
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint"):  # the monitor has a new name
        fit(Noisy(), Checkpoint(tmp_path, monitor="val/loss"), max_epochs=2, resume=tmp_path / "last.ckpt")
    assert step_of(tmp_path / "last.ckpt") == 8


def test_lightnings_own_trainer_can_save_with_it_and_read_its_files(tmp_path: Path) -> None:
    fit(Scored([0.5, 0.2]), Checkpoint(tmp_path, monitor="val/loss"), kind=pl.Trainer)
    assert names(tmp_path) == ["epoch001-step000004.ckpt", "last.ckpt"]
    callback, last = Checkpoint(tmp_path, monitor="val/loss"), tmp_path / "last.ckpt"
    fit(Scored([0.5, 0.2, 0.1]), callback, resume=last)
    assert names(tmp_path) == ["epoch002-step000006.ckpt", "last.ckpt"]
    fit(Scored([1, 1, 1, 0]), callback, resume=last, kind=pl.Trainer)
    assert names(tmp_path) == ["epoch003-step000008.ckpt", "last.ckpt"]


def test_a_torn_file_to_resume_from_is_replaced_by_the_newest_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, torn = tmp_path / "good.ckpt", tmp_path / "last.ckpt"
    write(BARE, good)
    assert good_or_newest(good) == good
    torn.write_bytes(good.read_bytes()[:400])
    assert good_or_newest(torn) == good
    assert f"Instead of {torn}, training continues from {good}" in caplog.text
    good.unlink()
    (tmp_path / "another_run").mkdir()
    write(BARE, tmp_path / "another_run" / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"last\.ckpt can't be used, and its directory has no other valid"):
        good_or_newest(torn)
