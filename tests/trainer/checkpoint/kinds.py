"""A small run with what may step beside the optimizer, compared number by number after it was resumed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from tiny import quiet
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

NUM_BATCHES, NUM_EPOCHS = 5, 4


def plateau(optimizer: Any, **options: Any) -> dict[str, Any]:
    """A scheduler whose threshold is never reached: it counts every step, and acts at every other one."""
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=10.0)
    return {"scheduler": scheduler, "monitor": "val/loss", **options}


@dataclass
class Kind:
    """What differs from a plain run."""

    scheduler: Callable[[Any], dict[str, Any]] | None = None
    callbacks: Callable[[], list[pl.Callback]] = list
    trainer: dict[str, Any] = field(default_factory=dict)
    num_val_loaders: int = 1
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
        self.num_samples = 4 * NUM_BATCHES
        self.automatic_optimization = not kind.two_optimizers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.head(self.backbone(batch)).squeeze() - batch.sum(1)).square().mean()
        self.log("train/loss", loss, on_epoch=True)
        squares = (39 * batch).round().square()  # whole numbers, whose sums are exact in any order
        self.total.update(squares)
        self.squares(squares)
        self.log("train/squares", self.squares, on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            optimizers: Any = self.optimizers()
            schedulers: Any = self.lr_schedulers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
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


def train(
    kind: Kind, folder: Path, saver: pl.Callback | None = None, ckpt_path: Path | None = None,
    num_samples: int = 4 * NUM_BATCHES, save: Path | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train, and save at the end if a file is given; weights, optimizers, schedulers and metrics then."""
    pl.seed_everything(5, verbose=False)
    module = Small(kind)
    module.num_samples = num_samples
    callbacks = [*kind.callbacks(), *([saver] if saver else [])]
    given = {"default_root_dir": folder, "num_sanity_val_steps": 0, "max_epochs": NUM_EPOCHS, **kind.trainer, **options}
    trainer = quiet(callbacks=callbacks, **given)
    trainer.fit(module, ckpt_path=ckpt_path, weights_only=True)
    if save is not None:
        torch.rand(5)  # what a script draws between training and saving is not part of training
        trainer.save_checkpoint(save)
    return {
        "step": trainer.global_step,
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "metrics": numbers({**trainer.callback_metrics, "total": module.total.compute()}),
        "optimizers": numbers([optimizer.state_dict() for optimizer in trainer.optimizers]),
        "weights": numbers(module.state_dict()),
    }


def numbers(tree: Any) -> Any:
    return apply_to_collection(tree, torch.Tensor, torch.Tensor.tolist)
