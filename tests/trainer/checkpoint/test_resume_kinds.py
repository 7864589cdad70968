"""Whatever steps beside the optimizer, a run that goes on from any checkpoint ends as one that was not interrupted."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from kinds import Kind, plateau, train
from pytorch_lightning.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch.optim import lr_scheduler

from evener.strategies import ConfigError, DDPStrategy
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.checkpoint.checkpoint_io import VerifiedCheckpointIO
from evener.trainer.checkpoint.file_io import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used"),  # it saves nothing
    pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric"),  # before the first validation
]


def restarts(optimizer: Any, **options: Any) -> dict[str, Any]:
    return {"scheduler": lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3), **options}


def cyclic(optimizer: Any) -> dict[str, Any]:
    return {"scheduler": lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3), "interval": "step"}


def swa() -> list[pl.Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2)]


KINDS = {
    "plateau": Kind(plateau),
    "plateau, every second epoch": Kind(lambda optimizer: plateau(optimizer, frequency=2)),
    "plateau by step": Kind(lambda optimizer: plateau(optimizer, monitor="train/loss_step", interval="step")),
    "plateau, accumulated": Kind(plateau, trainer={"accumulate_grad_batches": 2}),
    "plateau, rare validation": Kind(
        lambda optimizer: plateau(optimizer, strict=False), trainer={"check_val_every_n_epoch": 2}
    ),
    "validation by batches": Kind(plateau, trainer={"val_check_interval": 3, "check_val_every_n_epoch": None}),
    "several validation loaders": Kind(plateau, num_val_loaders=3, trainer={"val_check_interval": 2}),
    "warm restarts": Kind(restarts),
    "warm restarts by step": Kind(lambda optimizer: restarts(optimizer, interval="step", frequency=2)),
    "cyclic": Kind(cyclic),
    "two optimizers": Kind(two_optimizers=True),
    "weight averaging": Kind(plateau, swa),
    "moving average": Kind(plateau, lambda: [EMAWeightAveraging(decay=0.8)]),
    "early stopping": Kind(plateau, lambda: [EarlyStopping("val/loss", min_delta=10.0, patience=2)]),
    "accumulation by epoch": Kind(plateau, lambda: [GradientAccumulationScheduler({1: 2, 2: 3})]),
}


def verify_goes_on(kind: Kind, folder: Path, saver: pl.Callback) -> None:
    """Verify that a run from each checkpoint of an undisturbed run ends as that did."""
    whole = train(kind, folder, saver)
    steps = {torch.load(path, weights_only=True)["global_step"]: path for path in folder.glob("*.ckpt")}
    found = [path for step, path in sorted(steps.items()) if step != whole["step"]]
    assert len(found) > 1
    for path in found:
        assert train(kind, folder, ckpt_path=path) == whole, path.name


@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_goes_on_within_an_epoch_ends_as_if_undisturbed(name: str, tmp_path: Path) -> None:
    # a plateau's scheduler missed the end of the epoch in which the run went on
    verify_goes_on(KINDS[name], tmp_path, Checkpoint(tmp_path, every_n_steps=3, save_top_k=-1, monitor=None))


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize(
    "when",
    [{"every_n_train_steps": 1}, {"save_on_train_epoch_end": True}, {"save_on_train_epoch_end": False}],
    ids=["batches", "epochs", "validations"],
)
def test_a_run_goes_on_from_what_lightnings_callback_saved(
    when: dict[str, Any], accumulate: int, tmp_path: Path
) -> None:
    # of a validation it held the random states, so that the next epochs were drawn in another order; after the last
    # batch of an epoch, the loader's position was given to the next epoch, which was empty; at the end of an epoch,
    # Lightning has not yet cleared what the epoch logged
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **when)
    verify_goes_on(Kind(trainer={"accumulate_grad_batches": accumulate}), tmp_path, saver)


WITHIN = Path(__file__).parent / "files" / "without_format.ckpt"
"""Of `KINDS["plateau"]` after step 12 of 20; written before checkpoints had a number of their format."""


def changed(folder: Path, **changes: Any) -> Path:
    """A copy of the checkpoint with other values."""
    checkpoint = torch.load(WITHIN, weights_only=True)
    checkpoint["exact_resume"] |= changes
    VerifiedCheckpointIO().save_checkpoint(checkpoint, folder / "changed.ckpt")
    return folder / "changed.ckpt"


def test_a_run_goes_on_from_a_file_without_a_format_number(tmp_path: Path) -> None:
    whole, resumed = (train(KINDS["plateau"], tmp_path, ckpt_path=path, max_epochs=3) for path in (None, WITHIN))
    assert resumed["schedulers"][0]["last_epoch"] == whole["schedulers"][0]["last_epoch"] == 3
    logged = [run["metrics"]["train/loss_epoch"] for run in (resumed, whole)]
    assert logged[0] == pytest.approx(logged[1]), "what the epoch had logged before, too"
    for name, values in whole["weights"].items():
        torch.testing.assert_close(torch.tensor(resumed["weights"][name]), torch.tensor(values), msg=name)


def test_a_checkpoint_of_a_later_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="The checkpoint has format 2, and this version of evener reads up to 1"):
        train(KINDS["plateau"], tmp_path, ckpt_path=changed(tmp_path, format=2))


@pytest.mark.parametrize(
    "trainer", [{}, {"strategy": DDPStrategy(batch_size_is="global"), "devices": 2}], ids=["one device", "ddp"]
)
def test_a_dataset_that_ends_before_the_checkpoint_is_refused(trainer: dict[str, Any], tmp_path: Path) -> None:
    # 'IndexError: pop from an empty deque' with ranks, and without a word on one device
    train(Kind(), tmp_path, Checkpoint(tmp_path, every_n_steps=3, save_top_k=-1, monitor=None))
    (tmp_path / "epoch000-step000003.ckpt").rename(path := tmp_path / "within.ckpt")
    assert torch.load(path, weights_only=True)["exact_resume"]["format"] == 1
    told = "The checkpoint was saved after batch 3 of an epoch, and the training loader has 2: its dataset or"
    with pytest.raises(ConfigError, match=told):
        train(Kind(trainer=trainer), tmp_path, ckpt_path=path, num_samples=8)
