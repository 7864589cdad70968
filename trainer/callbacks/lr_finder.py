"""Find a learning rate by Lightning's search."""

import csv
import logging
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import LearningRateFinder as LightningsFinder
from typing_extensions import override

from ...strategies.core.errors import ConfigError

log = logging.getLogger(__name__)

FEWEST = 20  # steps without which nothing can be suggested: Lightning leaves out the first ten


class LearningRateFinder(LightningsFinder):
    """Raise the learning rate exponentially from step to step, and suggest the one at which the loss falls fastest.

    With `train.py` the search runs before training, with a module, data and random numbers of its own, so the training
    that follows is the same as without it. In a trainer of your own it runs when `fit` starts. Under ranks the losses
    are those of rank 0's samples.

    Args:
        min_lr: rate of the first step.
        max_lr: rate of the last step.
        num_steps: number of optimizer steps; each takes one batch.
        stop_ratio: end once the smoothed loss is this many times its lowest value; None never ends early.
        update: train with the suggested rate.
        key: the module's attribute (with `train.py` its option) that `update` sets.
        path: the file of rates and smoothed losses (csv); None writes none.

    Raises:
        ConfigError: rates or `num_steps` leave nothing to find.
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
        if not 0 < min_lr < max_lr or num_steps < FEWEST:
            raise ConfigError(
                f"lr_finder: expected 0 < min_lr < max_lr and num_steps of at least {FEWEST}; got min_lr={min_lr}, "
                f"max_lr={max_lr}, num_steps={num_steps}."
            )
        super().__init__(min_lr, max_lr, num_steps, "exponential", stop_ratio, update, key)
        self.update, self.key, self.path = update, key, path

    @override
    def lr_find(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        try:
            super().lr_find(trainer, pl_module)
        finally:  # by an exception it also ends a search that is all of the run
            if self.optimal_lr is not None and trainer.is_global_zero:
                self._tell(self.optimal_lr)

    def _tell(self, found: Any) -> None:
        if (rate := found.suggestion()) is None:
            log.warning("lr_finder: the loss never fell, so no rate is suggested. Raise max_lr or num_steps.")
        else:
            log.info("lr_finder: the loss falls fastest at a learning rate of %.3g", rate)
        if self.path is not None:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "w", newline="", encoding="utf-8") as file:
                rows = zip(found.results["lr"], found.results["loss"], strict=False)
                csv.writer(file).writerows([("lr", "smoothed"), *rows])
