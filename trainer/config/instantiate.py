"""Instantiate the objects of config groups."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import hydra.utils
import pytorch_lightning as pl
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from ...strategies import ConfigError
from .checks import entries

QUIET: dict[str, Any] = {
    "max_time": None, "limit_val_batches": 0, "num_sanity_val_steps": 0, "profiler": None,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip
"""The trainer's options for steps that are not the run's own."""


_OWN = ("evener.strategies.", "evener.trainer.")
"""What the names of this project's classes begin with; the module and the data are the user's."""

_prepared: dict[int, tuple[Any, Callable[..., Any]]] = {}
"""What `prepare` has found, by the identity of the options."""

_made: dict[int, tuple[str, Any]] = {}
"""Objects that `prepare` has made, with their group, by the identity of their options, until they are asked for."""


def prepare(cfg: DictConfig) -> None:
    """Find the classes of a job's objects, and convert their arguments, so that `instantiate` only has to call them.

    Ranks that are forked afterwards need not do it each. Options that contain other objects are left out, because these
    would be made here. The classes of this project are called at once: theirs do not ask for the rank.

    Raises:
        ImportError: a class can't be found.
        ConfigError: an object of this project refuses its options.
    """
    one = [(key, cfg.get(key)) for key in ("strategy", "module", "data", "checkpoint", "trainer")]
    several = [entry for group in ("callbacks", "logger") for entry in entries(group, cfg.get(group))]
    _prepared.clear()
    _made.clear()
    for key, options in [*one, *several]:
        if options and num_targets(OmegaConf.to_container(options)) == 1:
            _prepared[id(options)] = options, constructor(key, options)
            if key != "trainer" and str(options["_target_"]).startswith(_OWN):
                _made[id(options)] = key, instantiate(key, options)


def num_targets(options: Any) -> int:
    """Count the objects that options make, those within them included."""
    if isinstance(options, list):
        return sum(map(num_targets, options))
    return ("_target_" in options) + num_targets([*options.values()]) if isinstance(options, dict) else 0


def constructor(key: str, options: Any) -> Callable[..., Any]:
    """Return the class of one config group with its arguments; `instantiate` calls it.

    Raises:
        ConfigError: objects within the options raised TypeError, ValueError, or one of Lightning's or our own errors.
    """
    if id(options) in _prepared:
        return _prepared[id(options)][1]
    with refusals_named(key, options):
        return hydra.utils.instantiate(options, _convert_="all", _partial_=True)


def instantiate(key: str, options: Any) -> Any:
    """Instantiate the object of one config group.

    Args:
        options: `_target_` and its arguments.

    Raises:
        ConfigError: the constructor raised TypeError, ValueError, or one of Lightning's or our own errors.
    """
    if id(options) in _made:
        return _made.pop(id(options))[1]
    make = constructor(key, options)
    with refusals_named(key, options):
        return make()


@contextmanager
def refusals_named(key: str, options: Any) -> Generator[None]:
    """Have errors by which a constructor refuses its arguments tell the config group."""
    try:
        yield
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
    make = constructor("trainer", cfg.trainer)
    fixed = {**QUIET, "logger": False, "enable_checkpointing": False}
    return make(strategy=strategy or instantiate("strategy", cfg.strategy), **{**fixed, **options})
