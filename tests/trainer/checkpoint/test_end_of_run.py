"""What is saved after training has ended goes on as if it had not: also if steps or time ran out within an epoch."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_script
from kinds import Kind, Small, plateau, train
from pytorch_lightning.callbacks import EarlyStopping, GradientAccumulationScheduler, LambdaCallback, ModelCheckpoint
from tiny import Scored, quiet

from evener.strategies import DDPStrategy
from evener.trainer import Trainer
from evener.trainer.checkpoint import Checkpoint

DRAWS = Kind(plateau, norm=False)
KINDS = {
    "draws": DRAWS,
    "a schedule of accumulation": Kind(plateau, lambda: [GradientAccumulationScheduler({0: 2, 1: 3})], norm=False),
    "two steps a batch": Kind(two_optimizers=True),  # so that an odd number of steps is exceeded
}


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric")  # before the first validation
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *(("draws", steps) for steps in (4, 5)),
        ("a schedule of accumulation", 4),
        ("two steps a batch", 3),
    ],
)
def test_save_checkpoint_after_max_steps_goes_on_exactly(name: str, steps: int, tmp_path: Path) -> None:
    train(KINDS[name], tmp_path, max_steps=steps, save=(file := tmp_path / "own.ckpt"))
    assert train(KINDS[name], tmp_path, ckpt_path=file) == train(KINDS[name], tmp_path)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("saver", [Checkpoint, ModelCheckpoint])
def test_a_callback_that_saves_at_the_end_of_the_epoch_saves_the_point_within_it(saver: Any, tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"
    for steps in (2, 7, -1):
        callback = saver(tmp_path, every_n_epochs=1, save_last=True)
        found = train(DRAWS, tmp_path, callback, last if last.exists() else None, max_steps=steps)
    assert found == train(DRAWS, tmp_path)


def test_max_time_is_that_of_the_run_also_if_it_goes_on_from_another(tmp_path: Path) -> None:
    whole, steps = train(DRAWS, tmp_path), [0]
    while steps[-1] < whole["step"]:
        last = tmp_path / "last.ckpt" if len(steps) > 1 else None
        limit = {"microseconds": 1} if len(steps) < 4 else {"hours": 1}
        found = train(DRAWS, tmp_path, Checkpoint(tmp_path), last, max_time=limit)
        steps.append(found["step"])
        assert steps[-1] > steps[-2], "no step in this run"
    assert len(steps) > 2
    assert found == whole


def test_what_is_saved_after_an_evaluation_of_other_weights_is_as_lightning_saves_it(tmp_path: Path) -> None:
    trainer, module, file = quiet(max_steps=2), Small(Kind()), tmp_path / "own.ckpt"
    trainer.fit(module)
    trainer.save_checkpoint(file)
    assert "exact_resume" in torch.load(file, weights_only=True)
    trainer.validate(module, ckpt_path=file, verbose=False)
    trainer.save_checkpoint(file)
    assert "exact_resume" not in torch.load(file, weights_only=True)


def go_on_in_a_script(steps: int, folder: Path) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of Lightning, under a newer torch

    def part(**options: Any) -> dict[str, Any]:
        strategy = DDPStrategy(batch_size_is="global", timeout_s=60)
        return train(Kind(norm=False, trainer={"strategy": strategy, "devices": 2}), folder, **options)

    part(max_steps=steps, save=(file := folder / "own.ckpt"))  # by the script: its ranks have ended
    assert part(ckpt_path=file) == part()


@pytest.mark.parametrize("steps", [5, 7])
def test_a_script_saves_where_its_ranks_have_ended(steps: int, tmp_path: Path) -> None:
    run_script(go_on_in_a_script, steps, tmp_path)


def fit_flat(folder: Path, resume: str | None = None, **options: Any) -> tuple[list[str], Trainer]:
    """Train with a validation loss that never gets better; return the steps begun and the epochs ended, and the run."""
    seen: list[str] = []
    look = LambdaCallback(
        on_train_batch_start=lambda trainer, *_: seen.append(f"step {trainer.global_step}"),
        on_train_epoch_end=lambda trainer, _: seen.append(f"end of {trainer.current_epoch}"),
    )
    saver = Checkpoint(folder, interval_s=0, save_top_k=-1, filename="{step}", save_last=True)
    callbacks = [EarlyStopping("val/loss", patience=2), saver, look]
    trainer = quiet(callbacks=callbacks, num_sanity_val_steps=0, **{"max_epochs": 9, **options})
    trainer.fit(Scored([1.0] * 9), ckpt_path=None if resume is None else folder / resume)
    return seen, trainer


@pytest.mark.parametrize(
    ("options", "epochs", "why"),
    [({}, 3, "it was stopped early"), ({"max_epochs": 1}, 1, "max_epochs or max_steps is reached")],
)
def test_a_finished_run_trains_no_more_and_says_why(
    options: dict[str, Any], epochs: int, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit_flat(tmp_path, **options)
    with caplog.at_level(logging.INFO):
        seen, trainer = fit_flat(tmp_path, "last.ckpt", **options)
    assert seen == []
    assert (trainer.global_step, trainer.current_epoch) == (2 * epochs, epochs)
    assert trainer.callback_metrics["val/loss"] == 1.0
    assert f"has finished, at step {2 * epochs} ({why})" in caplog.text


def test_an_epoch_that_was_to_be_the_last_is_ended(tmp_path: Path) -> None:
    # saved after the third validation, within an epoch of two
    seen, _ = fit_flat(tmp_path, val_check_interval=0.5)
    assert seen[-2:] == ["step 2", "end of 1"]
    (tmp_path / "last.ckpt").unlink()
    seen, trainer = fit_flat(tmp_path, "3.ckpt", val_check_interval=0.5)
    assert seen == ["end of 1"]
    assert trainer.global_step == 3
