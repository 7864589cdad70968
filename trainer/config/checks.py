"""Check a configuration before training; each error says what was given, what is allowed and what to do."""

import inspect
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers import Logger
from pytorch_lightning.strategies import Strategy

from ...strategies import ConfigError
from ...strategies.core.device_names import resolve_devices
from ...strategies.core.lightning_names import verify_family
from ._option_values import verify_options, verify_root
from ._targets import find_object, is_class, why_not_found
from .descriptions import all_options
from .group_files import PACKAGE
from .nearest import did_you_mean

KINDS: dict[str, type] = {
    "strategy": Strategy,
    "trainer": pl.Trainer,
    "module": pl.LightningModule,
    "data": pl.LightningDataModule,
    "checkpoint": pl.Callback,
}
"""Base class of each group's target."""

NEEDED = ("strategy", "trainer", "module")

AUTO = "auto"
"""The value of `resume` for a run that goes on in its own directory."""

MODES = ("fit", "validate", "test", "predict", "compare", "plan")


def verify_config(cfg: DictConfig) -> None:
    """Check everything that can be checked without instantiating objects.

    Args:
        cfg: the composed configuration of `conf/train.yaml`.

    Raises:
        ConfigError: the first mistake found.
    """
    verify_mode(cfg)
    options = plain(cfg)
    verify_root(options)
    if cfg.resume not in (None, "last", AUTO):
        verify_checkpoint_path(Path(cfg.resume))
    if cfg.mode != "plan":  # mode=plan does not need the devices to exist
        resolve_devices(plain(cfg.devices), cfg.accelerator)
    for key, kind in KINDS.items():
        if options.get(key) or key in NEEDED:
            verify_options(key, options[key], verify_target(key, options[key], kind))
    for group, kind in (("callbacks", pl.Callback), ("logger", Logger)):
        for key, entry in entries(group, options.get(group)):
            verify_options(key, entry, verify_target(key, entry, kind))
    verify_nested("", options)


def leave_out_defaults(cfg: DictConfig) -> None:
    """Leave out options of the chosen file of `conf/strategy`, at its values, that another class does not take.

    `strategy._target_=my_project.MyStrategy` names the class on top of that file, which is the one that has the most
    options of those that are all there.
    """
    parameters = inspect.signature(verify_target("strategy", plain(cfg.strategy), Strategy)).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    left = [] if takes_all else [name for name in cfg.strategy if name != "_target_" and name not in parameters]
    if left:
        texts = (
            {o.name: o.default for o in all_options(PACKAGE, f"strategy/{file}")} for file in PACKAGE.files("strategy")
        )
        files = [plain(OmegaConf.create("\n".join(f"{key}: {value}" for key, value in text.items()))) for text in texts]
        chosen = max((file for file in files if file.keys() <= cfg.strategy.keys()), key=len, default={})
        for name in left:
            if name in chosen and chosen[name] == plain(cfg.strategy[name]):
                del cfg.strategy[name]


def entries(group: str, options: Any) -> list[tuple[str, Any]]:
    """List a group's objects as (key, options): several by name, or the single one that a `_target_` makes.

    Args:
        group: `callbacks` or `logger`.
        options: that part of the configuration; None if it is empty.
    """
    if not options:
        return []
    if "_target_" in options:
        return [(group, options)]
    return [(f"{group}.{name}", entry) for name, entry in options.items() if entry is not None]


def verify_mode(cfg: DictConfig) -> None:
    """Check `mode` and `monitor_mode`."""
    if cfg.mode not in MODES:
        suggestion = did_you_mean(str(cfg.mode), MODES, "mode=")
        raise ConfigError(f"mode={cfg.mode} is unknown. Choose one of {', '.join(MODES)}.{suggestion}")
    if cfg.monitor_mode not in ("min", "max"):
        raise ConfigError(f"monitor_mode={cfg.monitor_mode} is unknown. Choose min or max.")


def verify_checkpoint_path(path: Path) -> None:
    """Check that a checkpoint given by path exists."""
    if path.is_dir():
        raise ConfigError(f"resume={path} is a directory. Give a file in it, such as last.ckpt, or resume=last.")
    if not path.is_file():
        raise ConfigError(f"resume={path} does not exist. Give the path of a checkpoint, or resume=last.")


def verify_target(key: str, options: Any, kind: type) -> type:
    """Import the class that a config's `_target_` names, and check its base class.

    Raises:
        ConfigError: `_target_` is missing, can't be imported, or is not a subclass of `kind`.
    """
    target = options.get("_target_") if isinstance(options, (dict, DictConfig)) else None
    expected = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__module__.split('.')[0]} {kind.__name__}"
    if not isinstance(target, str):
        raise ConfigError(f"{key}._target_ is missing. Set {key}._target_ to the import path of {expected}.")
    if target.startswith("__main__."):
        raise ConfigError(
            f"{key}._target_={target} can't be imported by workers. Move the class from __main__ to a module."
        )
    try:
        found = find_object(target)
    except Exception as exc:
        reason, suggestion = why_not_found(target, kind, exc)
        raise ConfigError(
            f"{key}._target_={target} can't be imported: {reason}. "
            f"{suggestion or f'Give the import path of {expected}.'}"
        ) from exc
    if is_class(found) and issubclass(found, kind):
        return found
    verify_family(found)
    given = f"the class {found.__module__}.{found.__qualname__}" if is_class(found) else f"a {type(found).__name__}"
    raise ConfigError(f"{key}._target_={target} must be {expected}; got {given}. Give the import path of a subclass.")


def verify_nested(key: str, options: Any) -> None:
    """Check that every `_target_` within a group's options is a class of an installed package or the user's project.

    A configuration from an untrusted source can't call `os.system`, `subprocess.Popen`, `eval` or `torch.load`.

    Args:
        key: the config key, for the message.
        options: plain dicts and lists.

    Raises:
        ConfigError: a target can't be imported, is a function, or belongs to Python's standard library.
    """
    children = options.items() if isinstance(options, dict) else enumerate(options) if isinstance(options, list) else ()
    for name, child in children:
        verify_nested(f"{key}.{name}" if key else str(name), child)
    if not isinstance(options, dict) or "_target_" not in options:
        return
    target = str(options["_target_"])
    try:
        found = find_object(target)
    except Exception as exc:
        raise ConfigError(f"{key}._target_={target} can't be imported. Give the import path of a class.") from exc
    if not is_class(found) or found.__module__.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"{key}._target_={target} is refused: it must be a class of an installed package or of your project. "
            "Give a class (a module, optimizer, dataset, callback, logger, ...), not a function."
        )


def plain(value: Any) -> Any:
    """Convert an OmegaConf container to plain lists and dicts."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
