"""Logged values: the same as Lightning's, value by value, and read only when somebody reads them."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from recording import SmallModule, loader
from seen import raw_points
from tiny import Tiny, quiet
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassCohenKappa, MulticlassF1Score

from evener.trainer import Trainer

TRAINERS = (Trainer, pl.Trainer)


class LoggingModule(SmallModule):
    """Logs numbers, tensors of every floating type, metrics, from many hooks, in every reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("half", loss.detach().half(), on_epoch=True)
        self.log("double", loss.detach().double(), on_step=False, on_epoch=True)
        self.log("shaped", loss.detach().reshape(1, 1))
        self.log("whole", 3, on_epoch=True)
        self.log("number", 0.1 * batch_idx)
        self.log("sum", loss, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("given", loss, on_step=False, on_epoch=True, batch_size=1 + batch_idx)
        self.mean.update(loss.detach())
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        if batch_idx == 2:
            self.log("sometimes", loss)
        changed = loss.detach().clone()
        self.log("changed", changed)
        changed.zero_()  # what was logged is the value at that moment
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("gradient", self.layer.weight.grad.norm())  # type: ignore[union-attr]

    def on_train_epoch_end(self) -> None:
        self.log("at the end", self.current_epoch + 0.5)

    def on_validation_epoch_end(self) -> None:
        self.log("val at the end", 2.0)


class Reader(pl.Callback):
    """Reads all metrics in some hooks; `every` decides at which batches."""

    def __init__(self, every: int) -> None:
        self.every, self.seen = every, []

    def read(self, trainer: Any, *_: Any) -> None:
        for metrics in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics):
            found = {key: (getattr(value, "dtype", type(value)), float(value)) for key, value in metrics.items()}
            self.seen.append(found)

    on_validation_start = on_validation_end = on_train_epoch_end = on_train_end = read

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.every == 0:
            self.read(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("from a callback", float(batch_idx), on_epoch=True)
        if batch_idx % self.every == 0:
            self.read(trainer)


# Lightning's advice, which it gives for an int and for every two loaders
pytestmark = pytest.mark.filterwarnings("ignore:You called `self.log\\('whole'")


@pytest.mark.parametrize(("every", "log_every"), [(1, 2), (4, 1), (100, 5)])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "val_check_interval": 3}])
def test_metrics_and_points_equal_lightnings(
    every: int, log_every: int, options: dict[str, Any], tmp_path: Path
) -> None:
    seen, written = [], []
    for number, cls in enumerate(TRAINERS):
        torch.manual_seed(0)
        reader, logger = Reader(every), TensorBoardLogger(tmp_path, name=str(number))
        given = {**options, "logger": logger, "log_every_n_steps": log_every, "callbacks": [reader]}
        trainer = quiet(cls, num_sanity_val_steps=0, max_epochs=2, **given)
        trainer.fit(LoggingModule(), loader(), loader(10))
        reader.read(trainer)
        seen.append(list(reader.seen))
        torch.manual_seed(1)  # Lightning's validation draws from training's random streams, and ours does not
        trainer.validate(LoggingModule(), loader(), verbose=False)
        written.append(sorted(raw_points(Path(logger.log_dir))))
    assert len(seen[0]) > 10
    assert seen[0][-3]["gradient"][1] > 0
    assert seen[0] == seen[1]
    steps = 6 if "accumulate_grad_batches" in options else 12  # of two epochs of six batches
    assert len([1 for tag, _, _ in written[0] if tag == "loss"]) == steps // log_every
    assert written[0] == written[1]


def test_a_number_has_the_type_that_the_precision_gives_it() -> None:
    """From the second step on it was float32 under `64-true`, which sets the default type in the step only."""
    found = []
    for cls in TRAINERS:
        trainer = quiet(cls, precision="64-true", limit_val_batches=0)
        trainer.fit(LoggingModule(), loader(), loader(4))
        found.append(trainer.callback_metrics["number"])
    assert found[0].dtype == found[1].dtype == torch.float64
    assert found[0] == found[1]


def test_a_value_of_a_copied_module_is_not_logged_as_the_original() -> None:
    copies = []

    class Copying(SmallModule):
        def on_train_batch_end(self, *args: Any) -> None:
            copies.append(deepcopy(self))

    module = Copying()
    quiet(limit_train_batches=1).fit(module, loader(), loader(4))
    assert copies[0].log.__self__ is copies[0]
    assert "log" not in vars(module)


class ChangesCollection(Tiny):
    """Logs a collection whose metrics share their states, updates one of them alone, then renames all."""

    def __init__(self) -> None:
        super().__init__(2)
        metrics = {"accuracy": MulticlassAccuracy(2), "f1": MulticlassF1Score(2), "kappa": MulticlassCohenKappa(2)}
        self.metrics = MetricCollection(metrics, prefix="train/")  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.metrics.update(batch[0], batch[1])
        if batch_idx == 4:
            self.metrics._modules["f1"].update(torch.eye(2), torch.tensor([0, 0]))  # type: ignore[operator]
        if batch_idx == 1 and self.current_epoch:
            self.metrics.prefix = "late/"
        self.log_dict(self.metrics, on_step=False, on_epoch=True)  # type: ignore[arg-type]
        return super().training_step(batch, batch_idx)


def test_a_collection_changed_between_calls_is_logged_as_lightnings() -> None:
    found = []
    for cls in TRAINERS:
        pl.seed_everything(0, verbose=False)
        data = DataLoader(TensorDataset(torch.randn(20, 2), torch.randint(2, (20,))), batch_size=4)
        trainer = quiet(cls, max_epochs=2)
        trainer.fit(ChangesCollection(), data)
        found.append({name: value.item() for name, value in trainer.callback_metrics.items()})
    assert {"train/f1", "late/f1"} <= set(found[0])
    assert found[0] == pytest.approx(found[1], abs=1e-6)


class LogsUnequal(pl.LightningModule):
    """Logs a float32 and a float64 mean, weighted by batches of unequal size."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        size = batch.shape[0] if batch_idx % 2 else 2**24 + 1  # which float32 has no number for
        self.log("single", batch.mean() / 3, batch_size=size)
        self.log("double", batch.double().mean() / 3, batch_size=size)


def test_an_epochs_means_are_lightnings_bit_by_bit() -> None:
    found = []
    for cls in TRAINERS:
        trainer, numbers = quiet(cls), torch.randn(22, generator=torch.Generator().manual_seed(0))
        trainer.test(LogsUnequal(), DataLoader(numbers, 4), verbose=False)  # pyright: ignore[reportArgumentType]
        found.append(trainer.callback_metrics)
    assert found[0] == found[1]
    assert found[0]["single"].dtype == found[1]["single"].dtype == torch.float32
