"""Find a learning rate before training (`callbacks=lr_finder`)."""

from typing import Any, cast

import pytorch_lightning as pl
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from ...strategies import ConfigError
from ...strategies.core import rng
from ..callbacks import LearningRateFinder
from ..config.checks import entries, verify_target
from ..config.instantiate import instantiate, module_and_data, quiet_trainer


def with_learning_rate(cfg: DictConfig, checkpoint: str | None) -> DictConfig:
    """Search for the learning rate if the callbacks include a finder, and take it out of the run's own callbacks.

    A run that goes on from a checkpoint keeps the rate of its optimizer.
    """
    finders = {
        key.removeprefix("callbacks."): options
        for key, options in entries("callbacks", cfg.get("callbacks"))
        if key != "callbacks" and issubclass(verify_target(key, options, pl.Callback), LearningRateFinder)
    }
    if not finders:
        return cfg
    own = OmegaConf.create({key: options for key, options in cfg.callbacks.items() if key not in finders})
    plain = cast("DictConfig", OmegaConf.merge({**cfg, "callbacks": None}, {"callbacks": own}))
    if cfg.mode != "fit" or checkpoint is not None or cfg.trainer.get("fast_dev_run"):
        rank_zero_info("lr_finder is skipped: the run does not begin a training of its own.")
        return plain
    for name, options in finders.items():
        finder: LearningRateFinder = instantiate(f"callbacks.{name}", options)
        if finder.update and finder.key not in cfg.module:
            raise ConfigError(
                f"callbacks.{name}.update=true needs the module's learning rate in the configuration, and module has "
                f"no option {finder.key}. Add it to the module's file, or give its name: callbacks.{name}.key=..."
            )
        _search(cfg, finder)
        if finder.update and finder.suggestion is not None:
            rank_zero_info(f"lr_finder: module.{finder.key}={finder.suggestion:.3g}")
            plain = cast("DictConfig", OmegaConf.merge(plain, {"module": {finder.key: finder.suggestion}}))
    return plain


def _search(cfg: DictConfig, finder: LearningRateFinder) -> None:
    """Run the search with a module, data, strategy and random state of its own."""
    with rng.isolated():
        module, data = module_and_data(cfg)
        steps: dict[str, Any] = {"max_epochs": -1, "max_steps": finder.num_steps, "accumulate_grad_batches": 1}
        quiet_trainer(cfg, callbacks=[finder], **steps).fit(module, datamodule=data)
