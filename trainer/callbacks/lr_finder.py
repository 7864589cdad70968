"""Find a learning rate: raise it from step to step, and suggest where the loss falls fastest."""

import csv
import logging
import math
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from typing_extensions import override

from ...strategies.core.errors import ConfigError
from ...strategies.registry import ranks_of

log = logging.getLogger(__name__)

SMOOTHING = 0.9
"""Weight of the earlier losses in the moving average."""

FIRST = 10
"""Losses that the average needs before a slope is read from it."""


class LearningRateFinder(pl.Callback):
    """Raise the learning rate exponentially from step to step, record the loss, and suggest a rate.

    The suggested rate is the one at which the smoothed loss falls fastest per factor of the rate. With `train.py` the
    test runs before training, with a module, data and random numbers of its own, so the training that follows is the
    same as without it. In a trainer of your own this callback *is* the run: it ends after `num_steps`, and the weights
    have been trained. The loss is that of the global batch under every strategy.

    Source: "Cyclical learning rates for training neural networks" (Smith 2017), section 3.3.

    Args:
        min_lr: rate of the first step.
        max_lr: rate of the last step.
        num_steps: number of optimizer steps; each takes one batch.
        stop_ratio: end once the smoothed loss is this many times its lowest value; None never ends early.
        update: train with the suggested rate (`train.py` only).
        key: the option of the module that `update` sets.
        path: the file of rates and losses (csv); None writes none.

    Raises:
        ConfigError: rates or `num_steps` leave nothing to find; or the module has several optimizers, optimizes
            manually, or runs under a strategy of several processes that is not one of this package.
    """

    def __init__(
        self,
        min_lr: float = 1e-6,
        max_lr: float = 1.0,
        num_steps: int = 100,
        stop_ratio: float | None = 4.0,
        update: bool = False,
        key: str = "lr",
        path: str | None = None,
    ) -> None:
        if not 0 < min_lr < max_lr:
            raise ConfigError(f"lr_finder: expected 0 < min_lr < max_lr; got min_lr={min_lr} and max_lr={max_lr}.")
        if num_steps < 2 * FIRST:
            raise ConfigError(f"lr_finder: num_steps must be at least {2 * FIRST}; got {num_steps}.")
        self.min_lr, self.max_lr, self.num_steps, self.stop_ratio = min_lr, max_lr, num_steps, stop_ratio
        self.update, self.key, self.path = update, key, path
        self.rates: list[float] = []
        self.losses: list[float] = []
        """The global batch's loss at each rate."""
        self.smoothed: list[float] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that one rate is searched for, and that the loss of the global batch is known."""
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise ConfigError(
                f"lr_finder: expected automatic optimization with one optimizer; {type(pl_module).__name__} has "
                f"{len(trainer.optimizers)}{'' if pl_module.automatic_optimization else ' and optimizes manually'}. "
                "Remove callbacks=lr_finder."
            )
        if trainer.world_size > 1 and ranks_of(trainer.strategy) is None:
            raise ConfigError(
                f"lr_finder: {type(trainer.strategy).__name__} does not tell the loss of the global batch. Run "
                "callbacks=lr_finder with strategy=single_device, ddp or fsdp."
            )
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                f"lr_finder: accumulate_grad_batches must be 1; got {trainer.accumulate_grad_batches}. Search with a "
                "trainer of its own."
            )

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Set the rate of this step, whatever a scheduler says."""
        rate = self.min_lr * (self.max_lr / self.min_lr) ** (len(self.rates) / (self.num_steps - 1))
        self.rates.append(rate)
        for group in trainer.optimizers[0].param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss, and end the run if it diverges; all ranks see the same numbers."""
        given = outputs["loss"] if isinstance(outputs, dict) and outputs else outputs
        loss = given.detach() if isinstance(given, torch.Tensor) else torch.zeros((), device=pl_module.device)
        ranks = ranks_of(trainer.strategy)
        self.record(float(loss if ranks is None else ranks.contract.agree(loss)))
        lowest = min(self.smoothed[1:], default=math.inf)
        diverged = self.stop_ratio is not None and self.smoothed[-1] > self.stop_ratio * lowest
        if diverged or not math.isfinite(self.smoothed[-1]) or len(self.losses) == self.num_steps:
            trainer.should_stop = True

    def record(self, loss: float) -> None:
        """Add a loss, and the moving average up to it."""
        self.losses.append(loss)
        before = self.smoothed[-1] * (1 - SMOOTHING ** (len(self.losses) - 1)) if self.smoothed else 0.0
        self.smoothed.append((SMOOTHING * before + (1 - SMOOTHING) * loss) / (1 - SMOOTHING ** len(self.losses)))

    @property
    def suggestion(self) -> float | None:
        """The rate at which the smoothed loss falls fastest; None if it never falls."""
        slopes = {
            i: self.smoothed[i + 1] - self.smoothed[i - 1]
            for i in range(FIRST, len(self.smoothed) - 1)
            if math.isfinite(self.smoothed[i + 1])
        }
        steepest = min(slopes, key=slopes.__getitem__, default=None)
        return None if steepest is None or slopes[steepest] >= 0 else self.rates[steepest]

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the losses, and log the suggestion."""
        if not trainer.is_global_zero:
            return
        found = self.suggestion
        tried = f"lr_finder: {len(self.losses)} steps with rates of {self.rates[0]:.3g} to {self.rates[-1]:.3g}"
        where = self.write(Path(self.path)) if self.path else ""
        if found is None:
            log.warning("%s: the loss never fell, so no rate is suggested. Raise max_lr or num_steps.%s", tried, where)
        else:
            log.info("%s: the loss falls fastest at a learning rate of %.3g%s", tried, found, where)

    def write(self, path: Path) -> str:
        """Write the losses; return what to say of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with (table := path.with_suffix(".csv")).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                [("lr", "loss", "smoothed"), *zip(self.rates, self.losses, self.smoothed, strict=True)]
            )
        return f" ({table})"
