"""Find what a run needs before it trains: the largest batch that fits into memory, and a learning rate."""

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import sized_len
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from ...strategies.core import rng
from ...strategies.core.devices import has_streams, is_out_of_memory
from ...strategies.core.errors import ConfigError
from ..callbacks import LearningRateFinder
from ..config.checks import instantiate, module_and_data, quiet_trainer

logger = logging.getLogger(__name__)

CONFIRMING_STEPS = 3
"""Steps of each attempt: the optimizer's state exists from the second step on."""


def with_batch_size(cfg: DictConfig) -> DictConfig:
    """Replace `data.batch_size=auto` with the largest batch size for which training steps fit into memory.

    Every attempt has a module, data and trainer of its own, which writes nothing.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "data.batch_size=auto is not supported with several processes. Run once with strategy=single_device "
            "devices=1, then set data.batch_size to the number in the log."
        )

    def data_of(size: int) -> pl.LightningDataModule:
        return instantiate("data", OmegaConf.merge(cfg.data, {"batch_size": size}))

    def fits(size: int) -> bool:
        trainer, fit = quiet_trainer(cfg, max_epochs=-1, max_steps=CONFIRMING_STEPS, callbacks=[]), True
        try:
            trainer.fit(instantiate("module", cfg.module), datamodule=data_of(size))
        except RuntimeError as exc:
            if not is_out_of_memory(exc):
                raise
            fit = False
        gc.collect()  # the trainer stays until the next attempt has ended: room for what a run holds beside its steps
        if (accelerator := torch.accelerator.current_accelerator()) is not None and has_streams(accelerator):
            torch.accelerator.empty_cache()
        logger.info("batch_size=auto: %d samples %s", size, "fit" if fit else "do not fit")
        return fit

    with rng.isolated():  # the run that follows is not affected
        data = data_of(1)
        data.prepare_data()
        data.setup("fit")
        if (num := sized_len(getattr(data.train_dataloader(), "dataset", None))) is None:
            raise ConfigError(
                "batch_size=auto needs a dataset of known length, in one DataLoader. Set data.batch_size."
            )
        size = largest(fits, num)
    rank_zero_info(f"batch_size=auto: data.batch_size={size}")
    found = cfg.copy()
    found.data.batch_size = size
    return found


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """Find the largest batch size up to a limit that fits, assuming that all smaller ones fit too.

    Doubles until a size does not fit, then bisects, and confirms the result by a second attempt; if that fails
    because memory is fragmented, a smaller size is tried.
    """
    good, bad = 0, limit + 1
    while good + 1 < bad:
        size = min(max(1, 2 * good), limit) if bad > limit else (good + bad) // 2
        good, bad = (size, bad) if fits(size) else (good, size)
    while good and not fits(good):
        good = good * 9 // 10
    if not good:
        raise ConfigError(
            "batch_size=auto: a batch of one sample does not fit into memory. Use a smaller model or input."
        )
    return good


def with_learning_rate(cfg: DictConfig, finders: Iterable[str], checkpoint: str | None) -> DictConfig:
    """Search for the learning rate by the named callbacks, which are taken out of the run's own.

    A run that goes on from a checkpoint keeps the rate of its optimizer.
    """
    found = cfg.copy()
    for name in finders:
        options = found.callbacks.pop(name)
        if cfg.mode != "fit" or checkpoint is not None or cfg.trainer.get("fast_dev_run"):
            rank_zero_info("lr_finder is skipped: the run does not begin a training of its own.")
            continue
        finder: LearningRateFinder = instantiate(f"callbacks.{name}", {**options, "update": False})
        if options.get("update") and finder.key not in cfg.module:
            raise ConfigError(
                f"callbacks.{name}.update=true needs the module's learning rate in the configuration, and module has "
                f"no option {finder.key}. Add it to the module's file, or give its name: callbacks.{name}.key=..."
            )
        finder._early_exit = True  # as Lightning's Tuner has it: the search alone
        with rng.isolated():
            module, data = module_and_data(cfg)
            whole: dict[str, Any] = {"max_epochs": -1, "check_val_every_n_epoch": sys.maxsize}
            quiet_trainer(cfg, callbacks=[finder], accumulate_grad_batches=1, **whole).fit(module, datamodule=data)
        rate = None if finder.optimal_lr is None else finder.optimal_lr.suggestion()
        if options.get("update") and rate is not None:
            rank_zero_info(f"lr_finder: module.{finder.key}={rate:.3g}")
            found.module[finder.key] = rate
    return found
