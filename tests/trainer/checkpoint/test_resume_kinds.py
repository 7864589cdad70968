"""Whatever steps beside the optimizer, a run that goes on from any checkpoint ends as one that was not interrupted."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from tiny import quiet
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader

from evener.strategies import ConfigError, DDPStrategy
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.checkpoint.checkpoint_io import VerifiedCheckpointIO
from evener.trainer.checkpoint.file_io import CheckpointError

NUM_BATCHES, NUM_EPOCHS = 5, 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used"),  # it saves nothing
    pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric"),  # before the first validation
]


def plateau(optimizer: Any, **options: Any) -> dict[str, Any]:
    # a threshold that is never reached: it counts every step, and acts at every other one
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=10.0)
    return {"scheduler": scheduler, "monitor": "val/loss", **options}


def restarts(optimizer: Any, **options: Any) -> dict[str, Any]:
    return {"scheduler": lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3), **options}


def cyclic(optimizer: Any) -> dict[str, Any]:
    return {"scheduler": lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3), "interval": "step"}


@dataclass
class Kind:
    """What differs from a plain run."""

    scheduler: Callable[[Any], dict[str, Any]] | None = None
    callbacks: Callable[[], list[pl.Callback]] = list
    trainer: dict[str, Any] = field(default_factory=dict)
    num_val_loaders: int = 1
    two_optimizers: bool = False


class Small(pl.LightningModule):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).double()
        self.head = torch.nn.Linear(3, 1).double()
        self.kind = kind
        self.num_samples = 4 * NUM_BATCHES
        self.automatic_optimization = not kind.two_optimizers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.head(self.backbone(batch)).squeeze() - batch.sum(1)).square().mean()
        self.log("train/loss", loss, on_epoch=True)
        if not self.automatic_optimization:
            optimizers: Any = self.optimizers()
            schedulers: Any = self.lr_schedulers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            optimizers[batch_idx % 2].step()
            for scheduler in schedulers:
                scheduler.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = (self.head(self.backbone(batch)).squeeze() - batch.sum(1)).square().mean()
        self.log("val/loss" if dataloader_idx == 0 else f"val/{dataloader_idx}", loss, add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        if self.kind.two_optimizers:
            both = [SGD(part.parameters(), 0.05, 0.9) for part in (self.backbone, self.head)]
            return both, [lr_scheduler.CosineAnnealingWarmRestarts(one, 3) for one in both]
        optimizer = SGD([p for p in self.parameters() if p.requires_grad], 0.05, 0.9)
        if self.kind.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.kind.scheduler(optimizer)}

    def train_dataloader(self) -> Any:
        return DataLoader(samples()[: self.num_samples], 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return [DataLoader(samples()[i:], 8) for i in range(self.kind.num_val_loaders)]


def samples() -> Any:
    return torch.linspace(-1, 1, 2 * 4 * NUM_BATCHES, dtype=torch.float64).reshape(-1, 2)


def ema() -> list[pl.Callback]:
    return [EMAWeightAveraging(decay=0.8)]


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
    "moving average": Kind(plateau, ema),
    "early stopping": Kind(plateau, lambda: [EarlyStopping("val/loss", min_delta=10.0, patience=2)]),
    "accumulation by epoch": Kind(plateau, lambda: [GradientAccumulationScheduler({1: 2, 2: 3})]),
}


def train(
    kind: Kind, folder: Path, saver: pl.Callback | None = None, ckpt_path: Path | None = None,
    num_samples: int = 4 * NUM_BATCHES,
) -> dict[str, Any]:  # fmt: skip
    """Train to the end; weights, optimizers and schedulers then."""
    torch.manual_seed(5)
    module = Small(kind)
    module.num_samples = num_samples
    callbacks = [*kind.callbacks(), *([saver] if saver else [])]
    options = {"default_root_dir": folder, "num_sanity_val_steps": 0, **kind.trainer}
    trainer = quiet(max_epochs=NUM_EPOCHS, callbacks=callbacks, **options)
    trainer.fit(module, ckpt_path=ckpt_path, weights_only=True)
    return {
        "step": trainer.global_step,
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "metrics": numbers(dict(trainer.callback_metrics)),
        "optimizers": numbers([optimizer.state_dict() for optimizer in trainer.optimizers]),
        "weights": numbers(module.state_dict()),
    }


def numbers(tree: Any) -> Any:
    return apply_to_collection(tree, torch.Tensor, torch.Tensor.tolist)


def verify_goes_on(kind: Kind, folder: Path, saver: pl.Callback, left_out: int = 0) -> None:
    """Verify that a run from each checkpoint of an undisturbed run, but for one step's, ends as that did."""
    whole = train(kind, folder, saver)
    steps = {torch.load(path, weights_only=True)["global_step"]: path for path in folder.glob("*.ckpt")}
    found = [path for step, path in sorted(steps.items()) if step not in (left_out, whole["step"])]
    assert len(found) > 1
    for path in found:
        assert train(kind, folder, ckpt_path=path) == whole, path.name


@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_goes_on_within_an_epoch_ends_as_if_undisturbed(name: str, tmp_path: Path) -> None:
    # a plateau's scheduler missed the end of the epoch in which the run went on
    verify_goes_on(KINDS[name], tmp_path, Checkpoint(tmp_path, every_n_steps=3, save_top_k=-1, monitor=None))


@pytest.mark.parametrize("place", ["batches", "validation", "epochs"])
def test_a_run_goes_on_from_what_lightnings_checkpoint_saved_in_a_hook(place: str, tmp_path: Path) -> None:
    # of a validation it held the random states, so that the next epochs were drawn in another order
    when: dict[str, Any] = {
        "batches": {"every_n_train_steps": 3}, "validation": {"save_on_train_epoch_end": False},
        "epochs": {"save_on_train_epoch_end": True},
    }[place]  # fmt: skip
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **when)
    # after the last batch of an epoch Lightning leaves out its validation and its end
    verify_goes_on(KINDS["plateau"], tmp_path, saver, left_out=15 if place == "batches" else 0)


WITHIN = Path(__file__).parent / "files" / "without_format.ckpt"
"""Of `KINDS["plateau"]` after step 12 of 20; written before checkpoints had a number of their format."""


def changed(folder: Path, **changes: Any) -> Path:
    """A copy of the checkpoint with other values; those that are None are left out."""
    checkpoint = torch.load(WITHIN, weights_only=True)
    entry = {**checkpoint["exact_resume"], **changes}
    checkpoint["exact_resume"] = {key: value for key, value in entry.items() if value is not None}
    VerifiedCheckpointIO().save_checkpoint(checkpoint, folder / "changed.ckpt")
    return folder / "changed.ckpt"


def test_a_run_goes_on_from_a_file_without_a_format_number(tmp_path: Path) -> None:
    whole = train(KINDS["plateau"], tmp_path)
    resumed = train(KINDS["plateau"], tmp_path, ckpt_path=WITHIN)
    assert resumed["schedulers"][0]["last_epoch"] == whole["schedulers"][0]["last_epoch"] == NUM_EPOCHS
    for name, values in whole["weights"].items():
        torch.testing.assert_close(torch.tensor(resumed["weights"][name]), torch.tensor(values), msg=name)


def test_a_checkpoint_says_its_format_and_a_later_one_is_refused(tmp_path: Path) -> None:
    train(KINDS["plateau"], tmp_path, Checkpoint(tmp_path, monitor=None))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["exact_resume"]["format"] == 1
    with pytest.raises(CheckpointError, match="The checkpoint has format 2, and this version of evener reads up to 1"):
        train(KINDS["plateau"], tmp_path, ckpt_path=changed(tmp_path, format=2))


def test_a_checkpoint_of_this_format_without_a_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="The checkpoint lacks rows of what resuming needs"):
        train(KINDS["plateau"], tmp_path, ckpt_path=changed(tmp_path, format=1, rows=None))


@pytest.mark.parametrize(
    "trainer", [{}, {"strategy": DDPStrategy(batch_size_is="global"), "devices": 2}], ids=["one device", "ddp"]
)
def test_a_dataset_that_ends_before_the_checkpoint_is_refused(trainer: dict[str, Any], tmp_path: Path) -> None:
    # 'IndexError: pop from an empty deque' with ranks, and without a word on one device
    path = tmp_path / "within.ckpt"
    train(Kind(), tmp_path, Checkpoint(tmp_path, every_n_steps=3, save_top_k=-1, monitor=None))
    (tmp_path / "epoch000-step000003.ckpt").rename(path)
    told = "The checkpoint was saved after batch 3 of an epoch, and the training loader has 2: its dataset or"
    with pytest.raises(ConfigError, match=told):
        train(Kind(trainer=trainer), tmp_path, ckpt_path=path, num_samples=8)


def test_a_dataset_of_another_length_is_told(tmp_path: Path) -> None:
    train(Kind(), tmp_path, Checkpoint(tmp_path, every_n_steps=3, save_top_k=-1, monitor=None))
    with pytest.warns(UserWarning, match="saved within an epoch of 20 samples, and the training dataset has 16"):
        train(Kind(), tmp_path, ckpt_path=tmp_path / "epoch000-step000003.ckpt", num_samples=16)
