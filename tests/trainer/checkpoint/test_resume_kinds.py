"""Whatever steps beside the optimizer, a run that goes on from any checkpoint ends as one that was not interrupted."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_script
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from tiny import Scored, quiet
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from evener.strategies import ConfigError, DDPStrategy
from evener.trainer import Trainer
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.checkpoint.file_io import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used"),  # it saves nothing
    pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric"),  # before the first validation
]


NUM_BATCHES, NUM_EPOCHS = 5, 4


@dataclass
class Kind:
    """What differs from a plain run."""

    scheduler: Callable[[Any], dict[str, Any]] | None = None
    callbacks: Callable[[], list[pl.Callback]] = list
    trainer: dict[str, Any] = field(default_factory=dict)
    num_val_loaders: int = 1
    num_samples: int = 4 * NUM_BATCHES
    two_optimizers: bool = False
    norm: bool = True  # batch norm, or else dropout


class Small(pl.LightningModule):
    """Metrics of an epoch and of all epochs, random numbers or running statistics, and what its kind says."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        torch.manual_seed(3)
        layer = torch.nn.BatchNorm1d(3) if kind.norm else torch.nn.Dropout(0.5)
        self.backbone = torch.nn.Sequential(torch.nn.Linear(2, 3), layer).double()
        self.head = torch.nn.Linear(3, 1).double()
        self.squares, self.total = MeanMetric(), SumMetric()  # of an epoch, and of all
        self.kind = kind
        self.automatic_optimization = not kind.two_optimizers

    def loss(self, batch: Any) -> Any:
        return (self.head(self.backbone(batch)).squeeze() - batch.sum(1)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train/loss", loss, on_epoch=True)
        squares = (39 * batch).round().square()  # whole numbers, whose sums are exact in any order
        self.total.update(squares)
        self.squares(squares)
        self.log("train/squares", self.squares, on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            optimizers, schedulers = self.optimizers(), self.lr_schedulers()
            for optimizer in optimizers:  # type: ignore[union-attr]
                optimizer.zero_grad()
            self.manual_backward(loss)
            for one in [*optimizers, *schedulers]:  # type: ignore[union-attr, misc]
                one.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log(f"val/{dataloader_idx or 'loss'}", self.loss(batch), add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        if self.kind.two_optimizers:
            both = [SGD(part.parameters(), 0.05, 0.9) for part in (self.backbone, self.head)]
            return both, [lr_scheduler.CosineAnnealingWarmRestarts(one, 3) for one in both]
        optimizer = SGD([p for p in self.parameters() if p.requires_grad], 0.05, 0.9)
        scheduler = {} if self.kind.scheduler is None else {"lr_scheduler": self.kind.scheduler(optimizer)}
        return {"optimizer": optimizer, **scheduler}

    def train_dataloader(self) -> Any:
        return DataLoader(samples()[: self.kind.num_samples], 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return [DataLoader(samples()[i:], 8) for i in range(self.kind.num_val_loaders)]


def samples() -> Any:
    return torch.linspace(-1, 1, 2 * 4 * NUM_BATCHES, dtype=torch.float64).reshape(-1, 2)


def train(
    kind: Kind, folder: Path, saver: pl.Callback | None = None, ckpt_path: Path | None = None,
    save: Path | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train, and save at the end if a file is given; weights, optimizers, schedulers and metrics then."""
    pl.seed_everything(5, verbose=False)
    module = Small(kind)
    callbacks = [*kind.callbacks(), *([saver] if saver else [])]
    given = {"default_root_dir": folder, "num_sanity_val_steps": 0, "max_epochs": NUM_EPOCHS, **kind.trainer, **options}
    trainer = quiet(callbacks=callbacks, **given)
    trainer.fit(module, ckpt_path=ckpt_path, weights_only=True)
    if save is not None:
        torch.rand(5)  # what a script draws between training and saving is not part of training
        trainer.save_checkpoint(save)
    ended = {
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "metrics": {**trainer.callback_metrics, "total": module.total.compute()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "weights": module.state_dict(),
    }
    return {"step": trainer.global_step, **apply_to_collection(ended, torch.Tensor, torch.Tensor.tolist)}


def plateau(optimizer: Any, **options: Any) -> dict[str, Any]:
    """A scheduler whose threshold is never reached: it counts every step, and acts at every other one."""
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=10.0)
    return {"scheduler": scheduler, "monitor": "val/loss", **options}


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
DRAWS = Kind(plateau, norm=False)


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


def test_a_run_goes_on_from_a_file_without_a_format_number_and_one_of_a_later_format_is_refused(tmp_path: Path) -> None:
    whole, resumed = (train(KINDS["plateau"], tmp_path, ckpt_path=path, max_epochs=3) for path in (None, WITHIN))
    assert resumed["schedulers"][0]["last_epoch"] == whole["schedulers"][0]["last_epoch"] == 3
    logged = [run["metrics"]["train/loss_epoch"] for run in (resumed, whole)]
    assert logged[0] == pytest.approx(logged[1]), "what the epoch had logged before, too"
    for name, values in whole["weights"].items():
        torch.testing.assert_close(torch.tensor(resumed["weights"][name]), torch.tensor(values), msg=name)
    checkpoint = torch.load(WITHIN, weights_only=True)
    checkpoint["exact_resume"]["format"] = 2
    torch.save(checkpoint, tmp_path / "later.ckpt")
    with pytest.raises(CheckpointError, match="The checkpoint has format 2, and this version of evener reads up to 1"):
        train(KINDS["plateau"], tmp_path, ckpt_path=tmp_path / "later.ckpt")


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
        train(Kind(trainer=trainer, num_samples=8), tmp_path, ckpt_path=path)


# what is saved after training has ended goes on as if it had not, also if steps or time ran out within an epoch


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        (DRAWS, 4), (DRAWS, 5),
        (Kind(plateau, lambda: [GradientAccumulationScheduler({0: 2, 1: 3})], norm=False), 4),
        (Kind(two_optimizers=True), 3),  # two steps a batch, so that an odd number of steps is exceeded
    ],
)  # fmt: skip
def test_save_checkpoint_after_max_steps_goes_on_exactly(kind: Kind, steps: int, tmp_path: Path) -> None:
    train(kind, tmp_path, max_steps=steps, save=(file := tmp_path / "own.ckpt"))
    assert train(kind, tmp_path, ckpt_path=file) == train(kind, tmp_path)


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
    assert f"The checkpoint's run has finished, at step {2 * epochs} ({why})" in caplog.text


def test_an_epoch_that_was_to_be_the_last_is_ended(tmp_path: Path) -> None:
    # saved after the third validation, within an epoch of two
    seen, _ = fit_flat(tmp_path, val_check_interval=0.5)
    assert seen[-2:] == ["step 2", "end of 1"]
    (tmp_path / "last.ckpt").unlink()
    seen, trainer = fit_flat(tmp_path, "3.ckpt", val_check_interval=0.5)
    assert seen == ["end of 1"]
    assert trainer.global_step == 3
