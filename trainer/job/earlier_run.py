"""Take from an earlier run what `resume` starts from: its newest or best checkpoint, and its module's configuration."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ...strategies import ConfigError
from ..checkpoint.file_io import find_best, find_newest

OF_NAME = {"last": find_newest, "best": find_best}
"""How the checkpoint is found for the values of `resume` that search the runs of a name."""


def checkpoint_of_name(cfg: DictConfig) -> Path:
    """Find the checkpoint of the runs of this name that `resume=last` or `best` means, or refuse a diverged run's."""
    home = Path(cfg.log_dir) / cfg.name
    found = OF_NAME[cfg.resume](home)
    if found is not None:
        return found
    if cfg.resume == "best" and find_newest(home) is not None:
        raise ConfigError(
            f"resume=best: no checkpoint under {home} says which is the best; only runs that rank them by a metric "
            "(checkpoint=best) do. Use resume=last, or give resume=<path>."
        )
    raise ConfigError(f"resume={cfg.resume}: no checkpoint found under {home}. Train first, or give resume=<path>.")


def module_of_run(cfg: DictConfig) -> DictConfig:
    """Read the module's configuration of the run that `resume` names, or refuse another value of one of its options."""
    if cfg.resume is None:
        raise ConfigError("config=run takes the module's configuration from an earlier run. Name it with resume=last.")
    checkpoint = checkpoint_of_name(cfg) if cfg.resume in OF_NAME else Path(cfg.resume)
    module = _module_of(checkpoint)
    if module is None:
        raise ConfigError(
            f"config=run: no .hydra/config.yaml with a module belongs to {checkpoint}. Give the module's options."
        )
    words = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    for key in [found[1] for word in words if (found := re.match(r"\+{0,2}module\.(\w+)=", word))]:
        here, there = cfg.module.get(key), module.get(key)
        if here != there:
            raise ConfigError(
                f"config=run takes module.{key}={there} from the run, but module.{key}={here} was given as well. Drop "
                "one of them."
            )
    return module


def _module_of(checkpoint: Path) -> DictConfig | None:
    """The resolved configuration of the module that a checkpoint was written from; None if it is not known."""
    found = (folder / ".hydra" / "config.yaml" for folder in checkpoint.absolute().parents[:3])
    file = next((path for path in found if path.is_file()), None)
    if file is None:
        return None
    try:
        cfg: Any = OmegaConf.load(file)
    except (OSError, ValueError, YAMLError) as exc:
        raise ConfigError(
            f"config=run: {file} can't be read ({' '.join(str(exc).split())}). Give the module's options instead."
        ) from exc
    try:
        options = OmegaConf.to_container(cfg.module, resolve=True)
    except (OmegaConfBaseException, AttributeError, ValueError):
        return None
    return OmegaConf.create(options) if isinstance(options, dict) else None


@contextmanager
def weights_that_fit(checkpoint: str) -> Generator[None]:
    """Explain, inside the block, that a checkpoint has other weights than the module."""
    try:
        yield
    except RuntimeError as exc:
        if "loading state_dict for" not in str(exc):
            raise
        _, *lines = [line.strip().rstrip(". ") for line in str(exc).splitlines() if line.strip()]
        raise ConfigError(
            f"resume={checkpoint} does not fit the module: {lines[0] if lines else exc}. Give the module the options "
            "that it was trained with, or add config=run, which takes them from that run."
        ) from exc
