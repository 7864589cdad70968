"""Compose a configuration, check it and run it: `train(cfg)`. The command line is in `main.py`."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.strategies import Strategy

from ...strategies import ConfigError
from ..config.checks import verify_config, verify_target
from ..config.missing_values import incomplete
from ..job.result import Result
from ..launch.launcher import launch

ADVISORY_MODES = ("compare", "plan")
"""The modes that only advise and return no result."""


def train(cfg: DictConfig) -> Result:
    """Run what a configuration describes, in as many processes as its strategy needs.

    Args:
        cfg: composed by Hydra's main or by `compose`; not modified.

    Returns:
        Metrics, checkpoint paths and the run directory.

    Raises:
        ConfigError: an option can't be honoured.
    """
    given: Any = cfg
    if not isinstance(given, DictConfig) or "mode" not in given:
        raise ConfigError(f"train: expected a configuration, got {type(given).__name__}. Use train(compose([...])).")
    if cfg.mode in ADVISORY_MODES:
        raise ConfigError(
            f"mode={cfg.mode} does not train, so train() has no result to return. Run python train.py mode={cfg.mode}."
        )
    return launch(prepare(cfg))


def prepare(cfg: DictConfig) -> DictConfig:
    """Check a configuration, resolve its interpolations, and create the run directory.

    Returns:
        A resolved copy.

    Raises:
        ConfigError: the first mistake found, or a run directory that can't be written.
    """
    cfg = cfg.copy()
    if not inside_hydra(cfg):
        with open_dict(cfg):
            cfg.run_dir = str(default_run_dir(cfg))
    for key in ("name", "log_dir"):
        if type(cfg[key]) is int:  # name=7
            cfg[key] = str(cfg[key])
    if str(cfg.devices) == "-1":  # the strategies take it on any device; Lightning on accelerators only
        cfg.devices = "auto"
    try:
        resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as exc:
        raise ConfigError(incomplete(cfg, exc)) from exc
    assert isinstance(resolved, dict)
    cfg = OmegaConf.create({str(key): value for key, value in resolved.items()})
    verify_config(cfg)
    cfg.run_dir = str(Path(cfg.run_dir).absolute())
    try:
        Path(cfg.run_dir).mkdir(parents=True, exist_ok=True)
        (Path(cfg.run_dir) / "train.log").touch()
    except OSError as exc:
        raise ConfigError(
            f"run_dir={cfg.run_dir} can't be written ({exc.strerror}). Set log_dir to a writable directory."
        ) from exc
    return cfg


def inside_hydra(cfg: DictConfig) -> bool:
    """Whether `run_dir` resolves: it defaults to Hydra's output directory."""
    try:
        return cfg.run_dir is not None
    except OmegaConfBaseException:
        return False


def default_run_dir(cfg: DictConfig) -> Path:
    """The run directory for a configuration composed outside Hydra's main, with the layout of `conf/hydra`."""
    cls = verify_target("strategy", cfg.strategy, Strategy)
    strategy = getattr(cls, "strategy_name", cls.__name__)
    return Path(str(cfg.log_dir)) / str(cfg.name) / strategy / datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")


def compose(overrides: Sequence[str] = (), config_name: str = "train") -> DictConfig:
    """Compose `conf/train.yaml` in Python, like the command line.

    Args:
        overrides: such as `["strategy=ddp", "devices=2"]`.
        config_name: the root configuration.

    Returns:
        The configuration for `train`.

    Raises:
        ConfigError: `overrides` is a string, not a list.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"compose: overrides must be a list; got {overrides!r}. Use compose([{overrides!r}]).")
    with initialize_config_module("evener.conf", version_base="1.3"):
        return hydra_compose(config_name, overrides=list(overrides))
