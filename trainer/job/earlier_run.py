"""Take from an earlier run what `resume` starts from: its newest or best checkpoint, and its module's configuration."""

import re
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from yaml import YAMLError

from ...strategies import ConfigError
from ..checkpoint.find import find_best, find_newest

_MISMATCH = re.compile(r"size mismatch for (\S+): .*?torch\.Size\((\[.*?\])\).*?torch\.Size\((\[.*?\])\)")


OF_NAME = {"last": find_newest, "best": find_best}
"""How the checkpoint is found for the values of `resume` that search the runs of a name."""


def checkpoint_of_name(cfg: DictConfig) -> Path:
    """Find the checkpoint of the runs of this name that `resume=last` or `best` means, or refuse a diverged run's."""
    home = Path(cfg.log_dir) / cfg.name
    found = OF_NAME[cfg.resume](home)
    if found is not None:
        if getattr(rank_zero_only, "rank", 0) == 0 and (name := _nonfinite(found)) is not None:
            raise ConfigError(
                f"resume={cfg.resume}: {found} is of a run that diverged: {name} contains nan or infinity. Give an "
                "earlier checkpoint (resume=<path>)."
            )
        return found
    if cfg.resume == "best" and find_newest(home) is not None:
        raise ConfigError(
            f"resume=best: no checkpoint under {home} says which is the best; only runs that rank them by a metric "
            "(checkpoint=best) do. Use resume=last, or give resume=<path>."
        )
    raise ConfigError(f"resume={cfg.resume}: no checkpoint found under {home}. Train first, or give resume=<path>.")


def _nonfinite(checkpoint: Path) -> str | None:
    """The first of the weights that are not finite; sharded weights, which are in other files, are not read."""
    loaded: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    weights = loaded.get("state_dict", {})
    tensors = ((name, value) for name, value in weights.items() if isinstance(value, torch.Tensor))
    return next((name for name, value in tensors if not torch.isfinite(value).all()), None)


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
def weights_that_fit(cfg: DictConfig, checkpoint: str) -> Generator[None]:
    """Explain, inside the block, that a checkpoint has other weights than the module."""
    try:
        yield
    except RuntimeError as exc:
        if "loading state_dict for" not in str(exc):
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
    then = None
    with suppress(ConfigError):
        then = _module_of(Path(checkpoint))
    if then is None:
        return " Give the module the options that it was trained with."
    keys = [*cfg.module, *(key for key in then if key not in cfg.module)]
    other = [key for key in keys if cfg.module.get(key) != then.get(key)]
    told = [
        f"module.{key} is {cfg.module.get(key, 'not given')} here, {then.get(key, 'not given')} there" for key in other
    ]
    return f" {'; '.join(told)}. Add config=run to take the module's configuration from that run." if told else ""
