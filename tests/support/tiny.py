"""A small module, and trainers that print and write nothing, for tests in which neither matters."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from evener.trainer import Trainer


class Tiny(pl.LightningModule):
    """One linear layer, trained by SGD; the loss is the mean square of its outputs."""

    lr = 0.1

    def __init__(self, num_inputs: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(num_inputs, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0] if isinstance(batch, list) else batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Line(Tiny):
    """Learns 3 x."""

    lr = 0.2

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.layer(batch[0]) - 3 * batch[0]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)


class Scored(Tiny):
    """Two batches an epoch; `name` is in each epoch's validation what `scores` say."""

    name = "val/loss"

    def __init__(self, scores: list[float]) -> None:
        super().__init__(2)
        self.scores = scores

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(self.name, self.scores[self.current_epoch])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)

    val_dataloader = train_dataloader


class Thaw(pl.callbacks.BaseFinetuning):
    """The first layer of `net` is frozen in the first epoch."""

    def __init__(self, lr: float | None = None) -> None:
        super().__init__()
        self.lr = lr

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=self.lr)


class Streamed(IterableDataset[Any]):
    """Samples in their order, of which nothing else is known."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return (self.samples[i] for i in range(len(self.samples)))


class Points(pl.loggers.logger.DummyLogger):
    """Keeps what was logged, as (step, name, value), and by calls, without the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, str, float]] = []
        self.points: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen += [(step or 0, name, float(value)) for name, value in metrics.items()]
        self.points.append((step, {name: float(value) for name, value in metrics.items() if name != "epoch"}))

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, value) for step, logged, value in self.seen if logged == name]

    def last(self) -> dict[str, float]:
        return {name: value for _, name, value in self.seen}


def quiet(kind: type[pl.Trainer] = Trainer, **options: Any) -> Any:
    """A trainer of one epoch, or of the steps that are given, that prints and writes only what it is given for that."""
    saves = any(isinstance(callback, pl.callbacks.Checkpoint) for callback in options.get("callbacks", ()))
    return kind(
        **{
            "accelerator": "cpu", "max_epochs": -1 if "max_steps" in options else 1, "logger": False,
            "enable_checkpointing": saves, "enable_progress_bar": False, "enable_model_summary": False, **options,
        }
    )  # fmt: skip
