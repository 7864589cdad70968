"""Take from an earlier run what `resume` starts from: its newest checkpoint, and its module's configuration."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...strategies import ConfigError
from ..checkpoint.find import find_newest

_MISMATCH = re.compile(r"size mismatch for (\S+): .*?torch\.Size\((\[.*?\])\).*?torch\.Size\((\[.*?\])\)")


def newest_of_name(cfg: DictConfig) -> Path:
    """Find the newest checkpoint of the runs of this name.

    Raises:
        ConfigError: there is none.
    """
    home = Path(cfg.log_dir) / cfg.name
    newest = find_newest(home)
    if newest is None:
        raise ConfigError(f"resume=last: no checkpoint found under {home}. Train first, or give resume=<path>.")
    return newest


def module_of_run(cfg: DictConfig) -> DictConfig:
    """Read the module's configuration of the run that `resume` names; for `config=run`.

    Raises:
        ConfigError: no checkpoint is named, its run directory has no configuration, or another value of one of the
            module's options was given.
    """
    if cfg.resume is None:
        raise ConfigError("config=run takes the module's configuration from an earlier run. Name it with resume=last.")
    checkpoint = newest_of_name(cfg) if cfg.resume == "last" else Path(cfg.resume)
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
    cfg: Any = OmegaConf.load(file)
    try:
        options = OmegaConf.to_container(cfg.module, resolve=True)
    except OmegaConfBaseException:
        return None
    return OmegaConf.create(options) if isinstance(options, dict) else None


@contextmanager
def weights_that_fit(cfg: DictConfig, checkpoint: str | None) -> Generator[None]:
    """Explain, inside the block, that a checkpoint has other weights than the module.

    Raises:
        ConfigError: it has.
    """
    try:
        yield
    except RuntimeError as exc:
        if checkpoint is None or "loading state_dict for" not in str(exc):
            raise
        raise ConfigError(
            f"resume={checkpoint} does not fit the module: {_difference(str(exc))}.{_other_options(cfg, checkpoint)}"
        ) from exc


def _difference(error: str) -> str:
    """The first difference in torch's error."""
    if found := _MISMATCH.search(error):
        return f"{found[1]} has shape {found[2]} in the checkpoint and {found[3]} in the module"
    lines = [line.strip().rstrip(". ") for line in error.splitlines() if line.strip()]
    return lines[1 if len(lines) > 1 else 0]


def _other_options(cfg: DictConfig, checkpoint: str) -> str:
    """Which options of the module were others in the checkpoint's run, and how to take those."""
    then = _module_of(Path(checkpoint))
    if then is None:
        return " Give the module the options that it was trained with."
    keys = [*cfg.module, *(key for key in then if key not in cfg.module)]
    other = [key for key in keys if cfg.module.get(key) != then.get(key)]
    told = [
        f"module.{key} is {cfg.module.get(key, 'not given')} here, {then.get(key, 'not given')} there" for key in other
    ]
    return f" {'; '.join(told)}. Add config=run to take the module's configuration from that run." if told else ""
