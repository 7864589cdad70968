"""Find what a run starts from: a checkpoint, an earlier run's module, the largest batch that fits, a learning rate."""

import gc
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from lightning_fabric.utilities.data import sized_len
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from yaml import YAMLError

from ...strategies import ConfigError
from ...strategies.core import rng
from ...strategies.core.devices import has_streams, is_out_of_memory
from ..callbacks import LearningRateFinder
from ..checkpoint.file_io import find_best, find_newest, good_or_newest
from ..checkpoint.snapshots import saved_in_memory
from ..config.checks import AUTO, instantiate, module_and_data, quiet_trainer

logger = logging.getLogger(__name__)

OF_NAME = {"last": find_newest, "best": find_best}
"""How the checkpoint is found for the values of `resume` that search the runs of a name."""

CONFIRMING_STEPS = 3
"""Steps of each attempt: the optimizer's state exists from the second step on."""


def starting_checkpoint(cfg: DictConfig) -> str | None:
    """Find the checkpoint to start from: after a restart the run's own newest, otherwise the one of `resume`."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if restarted or cfg.resume == AUTO:
        # a run on one machine may have its snapshot in memory
        newest = find_newest(cfg.run_dir, saved_in_memory(checkpoint_folder(cfg)) if cfg.num_nodes == 1 else None)
        if newest is not None:
            rank_zero_info(f"Restarted: continuing from {newest}")
            return str(newest)
    if cfg.resume in OF_NAME:
        return str(checkpoint_of_name(cfg))
    if cfg.resume in (None, AUTO):
        return None
    return str(good_or_newest(cfg.resume)) if cfg.mode == "fit" else cfg.resume


def checkpoint_folder(cfg: DictConfig) -> str | None:
    """The directory of the run's checkpoints, if it writes any."""
    return (cfg.get("checkpoint") or {}).get("dirpath")


def checkpoint_of_name(cfg: DictConfig) -> Path:
    """Find the checkpoint of the runs of this name that `resume=last` or `best` means."""
    home = Path(cfg.log_dir) / cfg.name
    if (found := OF_NAME[cfg.resume](home)) is not None:
        return found
    ranked = " that says which is the best, as those of checkpoint=best do" if cfg.resume == "best" else ""
    raise ConfigError(
        f"resume={cfg.resume}: no checkpoint found under {home}{ranked}. Train first, or give resume=<path>."
    )


def module_of_run(cfg: DictConfig) -> DictConfig:
    """Read the module's configuration of the run that `resume` names, or refuse another value of one of its options."""
    if cfg.resume is None:
        raise ConfigError("config=run takes the module's configuration from an earlier run. Name it with resume=last.")
    checkpoint = checkpoint_of_name(cfg) if cfg.resume in OF_NAME else Path(cfg.resume)
    files = (folder / ".hydra" / "config.yaml" for folder in checkpoint.absolute().parents[:3])
    file = next((path for path in files if path.is_file()), checkpoint.parent / ".hydra" / "config.yaml")
    try:
        of_run: Any = OmegaConf.load(file)
        module: Any = OmegaConf.create(OmegaConf.to_container(of_run.module, resolve=True))
    except (OSError, ValueError, AttributeError, YAMLError, OmegaConfBaseException) as exc:
        raise ConfigError(
            f"config=run: {file} can't be read ({' '.join(str(exc).split())}). Give the module's options instead."
        ) from exc
    words = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    for key in [found[1] for word in words if (found := re.match(r"\+{0,2}module\.(\w+)=", word))]:
        here, there = cfg.module.get(key), module.get(key)
        if here != there:
            raise ConfigError(
                f"config=run takes module.{key}={there} from the run, but module.{key}={here} was given as well. Drop "
                "one of them."
            )
    return module


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
        whole: dict[str, Any] = {"max_epochs": -1, "check_val_every_n_epoch": sys.maxsize}
        with rng.isolated():
            module, data = module_and_data(cfg)
            quiet_trainer(cfg, callbacks=[finder], accumulate_grad_batches=1, **whole).fit(module, datamodule=data)
        rate = None if finder.optimal_lr is None else finder.optimal_lr.suggestion()
        if options.get("update") and rate is not None:
            rank_zero_info(f"lr_finder: module.{finder.key}={rate:.3g}")
            found.module[finder.key] = rate
    return found
