"""Instantiate the objects of config groups."""

from typing import Any

import hydra.utils
import pytorch_lightning as pl
from hydra.errors import InstantiationException
from omegaconf import DictConfig
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from ...strategies import ConfigError

QUIET: dict[str, Any] = {
    "max_time": None, "limit_val_batches": 0, "num_sanity_val_steps": 0, "profiler": None,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip
"""The trainer's options for steps that are not the run's own."""


def instantiate(key: str, options: Any, **more: Any) -> Any:
    """Instantiate the object of one config group from `_target_` and its arguments.

    Args:
        **more: further arguments, which replace those of the same name.

    Raises:
        ConfigError: the constructor, or that of an object within the options, raised TypeError, ValueError, or one of
            Lightning's or our own errors.
    """
    try:
        return hydra.utils.instantiate(options, _convert_="all", _partial_=True)(**more)
    except (InstantiationException, TypeError, ValueError, MisconfigurationException) as exc:
        cause = exc.__cause__ or exc if isinstance(exc, InstantiationException) else exc
        if isinstance(cause, (TypeError, ValueError, MisconfigurationException)) and not isinstance(cause, ConfigError):
            raise ConfigError(f"{key}: {options.get('_target_')} refused its options: {cause}") from exc
        raise cause from None


def module_and_data(cfg: DictConfig) -> tuple[pl.LightningModule, pl.LightningDataModule | None]:
    """Instantiate the module and the data; None if the module has its own."""
    return instantiate("module", cfg.module), instantiate("data", cfg.data) if cfg.get("data") else None


def quiet_trainer(cfg: DictConfig, strategy: Strategy | None = None, **options: Any) -> pl.Trainer:
    """Instantiate the trainer for steps that are not the run's own: nothing is shown, logged or saved.

    Args:
        strategy: None for the configured one.
        **options: replace the configured ones.
    """
    strategy = strategy or instantiate("strategy", cfg.strategy)
    fixed = {**QUIET, "logger": False, "enable_checkpointing": False, "strategy": strategy}
    return instantiate("trainer", cfg.trainer, **{**fixed, **options})
