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


def instantiate(key: str, options: Any, **hydra_options: Any) -> Any:
    """Instantiate the object of one config group.

    Args:
        options: `_target_` and its arguments.
        **hydra_options: such as `_partial_=True`.

    Raises:
        ConfigError: the constructor raised TypeError, ValueError, or one of Lightning's or our own errors.
    """
    try:
        return hydra.utils.instantiate(options, _convert_="all", **hydra_options)
    except InstantiationException as exc:
        cause = exc.__cause__
        if isinstance(cause, ConfigError):
            raise cause from exc
        if isinstance(cause, (TypeError, ValueError, MisconfigurationException)):
            raise ConfigError(f"{key}: {options.get('_target_')} refused its options: {cause}") from exc
        raise (cause or exc) from None


def module_and_data(cfg: DictConfig) -> tuple[pl.LightningModule, pl.LightningDataModule | None]:
    """Instantiate the module and the data; None if the module has its own."""
    return instantiate("module", cfg.module), instantiate("data", cfg.data) if cfg.get("data") else None


def quiet_trainer(cfg: DictConfig, strategy: Strategy | None = None, **options: Any) -> pl.Trainer:
    """Instantiate the trainer for steps that are not the run's own: nothing is shown, logged or saved.

    Args:
        strategy: None for the configured one.
        **options: replace the configured ones.
    """
    make = instantiate("trainer", cfg.trainer, _partial_=True)
    fixed = {**QUIET, "logger": False, "enable_checkpointing": False}
    return make(strategy=strategy or instantiate("strategy", cfg.strategy), **{**fixed, **options})
