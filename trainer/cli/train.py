"""Compose a configuration, check it and run it: `train(cfg)`. The command line is in `main.py`."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from ...strategies import ConfigError
from ..config.checks import leave_out_defaults, strategy_name, verify_config
from ..config.group_files import CONFIG_MODULE, Source
from ..config.plain_values import verify_own_data
from ..job.earlier_run import module_of_run
from ..job.result import Result
from ..job.summary import show_summary
from ..launch.launcher import launch
from ._help import composition_sentence, incomplete

ADVISORY_MODES = ("compare", "plan")
"""The modes that only advise and return no result."""


def train(cfg: DictConfig) -> Result:
    """Run what a configuration describes, in as many processes as its strategy needs.

    A notebook shows the closing table.

    Args:
        cfg: composed by Hydra's main or by `compose`; not modified.

    Returns:
        Metrics, checkpoint paths and the run directory.

    Raises:
        ConfigError: an option can't be honoured.
    """
    if not isinstance(cfg, DictConfig) or "mode" not in cfg:  # pyright: ignore[reportUnnecessaryIsInstance]  # users'
        raise ConfigError(f"train: expected a configuration, got {type(cfg).__name__}. Use train(compose([...])).")
    if cfg.mode in ADVISORY_MODES:
        raise ConfigError(
            f"mode={cfg.mode} does not train, so train() has no result to return. Run python train.py mode={cfg.mode}."
        )
    if cfg.get("hparams_search"):
        raise ConfigError("hparams_search runs many trainings, and train() one. Run python train.py hparams_search=...")
    result = launch(prepare(cfg))
    if Console().is_jupyter:
        show_summary(result, cfg.log_dir)
    return result


def prepare(cfg: DictConfig) -> DictConfig:
    """Check a configuration, resolve its interpolations, and create the run directory.

    Returns:
        A resolved copy.

    Raises:
        ConfigError: the first mistake found, or a run directory that can't be written.
    """
    cfg = check(cfg)
    cfg.run_dir = str(Path(cfg.run_dir).absolute())
    try:
        Path(cfg.run_dir).mkdir(parents=True, exist_ok=True)
        (Path(cfg.run_dir) / "train.log").touch()
        cfg.run_dir.encode()
    except UnicodeEncodeError as exc:
        raise ConfigError(
            f"run_dir={cfg.run_dir!a} is not UTF-8, so that neither logs nor results could name its files. Set "
            "log_dir to another directory."
        ) from exc
    except OSError as exc:
        raise ConfigError(
            f"run_dir={cfg.run_dir} can't be written ({exc.strerror}). Set log_dir to a writable directory."
        ) from exc
    return cfg


def check(cfg: DictConfig) -> DictConfig:
    """Check a configuration and resolve its interpolations.

    Returns:
        A resolved copy.

    Raises:
        ConfigError: the first mistake found.
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
    if cfg.get("config") == "run":
        cfg.module = module_of_run(cfg)
    try:
        resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as exc:
        raise ConfigError(incomplete(cfg, exc)) from exc
    assert isinstance(resolved, dict)
    cfg = OmegaConf.create({str(key): value for key, value in resolved.items()})
    leave_out_defaults(cfg)
    verify_config(cfg)
    return cfg


def inside_hydra(cfg: DictConfig) -> bool:
    """Whether `run_dir` resolves: it defaults to Hydra's output directory."""
    try:
        return cfg.run_dir is not None
    except OmegaConfBaseException:
        return False


def default_run_dir(cfg: DictConfig) -> Path:
    """The run directory for a configuration composed outside Hydra's main, with the layout of `conf/hydra`."""
    folder = Path(str(cfg.log_dir)) / str(cfg.name) / strategy_name(cfg)
    return folder / datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")


def compose(
    overrides: Sequence[str] = (), config_name: str = "train", config_dir: str | Path | None = None
) -> DictConfig:
    """Compose a configuration in Python, like the command line.

    Args:
        overrides: such as `["strategy=ddp", "devices=2"]`.
        config_name: the root configuration.
        config_dir: a project's own configuration directory, as for `main`, but relative to the current directory; None
            uses the configuration of this package.

    Returns:
        The configuration for `train`.

    Raises:
        ConfigError: `overrides` is a string, not a list; the directory has no such root; the configuration can't be
            composed; or an own module would be trained on an example's data.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"compose: overrides must be a list; got {overrides!r}. Use compose([{overrides!r}]).")
    source = Source(None if config_dir is None else str(Path(config_dir).absolute()), config_name)
    if not source.text(config_name):
        raise ConfigError(
            f"compose: {config_dir or CONFIG_MODULE} has no {config_name}.yaml. Give the root configuration's name in "
            "config_name and its directory in config_dir."
        )
    try:
        cfg = source.compose(source.named(overrides), return_hydra=True)
    except Exception as exc:
        if sentence := composition_sentence(exc, source, overrides):
            raise ConfigError(sentence) from exc
        raise
    if not OmegaConf.is_missing(cfg.module, "_target_"):
        verify_own_data(cfg.hydra.runtime.choices, overrides)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg
