"""Check what a configuration names, and build it; errors say what was given, what is allowed and what to do."""

import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra.utils
import pytorch_lightning as pl
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers import Logger
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from typing_extensions import TypeIs

from ...strategies import ConfigError
from ...strategies.core.devices import resolve_devices
from ...strategies.core.errors import did_you_mean
from ...strategies.core.lightning_names import verify_family
from ...strategies.core.options import HARMLESS, hints_of, verify_value
from ...strategies.registry import num_processes
from .composing import verify_not_gone, verify_plain, whole

MADE_ELSEWHERE = ("strategy", "logger", "callbacks", "enable_checkpointing")
"""Arguments of the trainer that have their own config groups."""


def verify_options(key: str, options: Mapping[str, Any], cls: type) -> None:
    """Check options against a constructor's arguments and, of this project and Lightning, against their annotations."""
    for name in options.keys() & MADE_ELSEWHERE if issubclass(cls, pl.Trainer) else ():
        group = "checkpoint" if name == "enable_checkpointing" else name
        none = "" if name == "strategy" else f", or {group}=none"
        raise ConfigError(f"{key}.{name} would be ignored: it has its own config group. Use {group}=<name>{none}.")
    parameters = annotations(cls)
    verify_names(key, options, cls, parameters)
    for name, value in options.items():
        hint, default = parameters.get(name, (Any, ...))
        if (path := f"{key}.{name}") == "trainer.devices":
            hint = int | str | list[int | str]  # names, too
        if value != default:
            verify_value(path, whole(value), hint)


def verify_names(key: str, options: Mapping[str, Any], cls: type, annotated: Mapping[str, Any]) -> None:
    """Refuse options that a class's constructor does not take."""
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a class that does not tell
        return
    given = [name for name in options if not (name.startswith("_") and name.endswith("_"))]
    # of this project's strategies it is known what they take as `**options`
    declared = annotated if hasattr(cls, "further_options") and cls.__module__.startswith("evener.") else {}
    known = list(dict.fromkeys([*(name for name in parameters if name != "options" or not declared), *declared]))
    unknown = [name for name in given if name not in known and options[name] not in HARMLESS.get(name, ())]
    for name in unknown:
        verify_not_gone(f"{key}.{name}")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if unknown and (declared or not takes_any):
        takes = f" It takes {', '.join(known)}." if known else " It takes no options."
        raise ConfigError(
            f"{key}.{unknown[0]} is not an option of {cls.__module__}.{cls.__qualname__}."
            f"{did_you_mean(unknown[0], known, f'{key}.') or takes}"
        )


def annotations(cls: type) -> dict[str, tuple[Any, Any]]:
    """Types and defaults of a class's constructor arguments, including those passed on as `**options`."""
    found: dict[str, tuple[Any, Any]] = {}
    for owner in (base for base in cls.__mro__ if "__init__" in vars(base)):
        init: Any = inspect.unwrap(vars(owner)["__init__"])
        parameters = inspect.signature(init).parameters if inspect.isfunction(init) else {}
        if owner.__module__.startswith(("evener.", f"{pl.__name__}.")):
            hints = hints_of(init)
            for name, parameter in parameters.items():  # the trainer's signature also has Lightning's arguments
                hint = hints.get(name, parameter.annotation)
                if hint is not parameter.empty and not isinstance(hint, str):
                    found.setdefault(name, (hint, parameter.default))
            further: Callable[[], dict[str, Any]] = vars(owner).get("further_options", dict)  # of its `**options`
            found |= {name: (hint, ...) for name, hint in further().items() if name not in found}
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found


KINDS: dict[str, type] = {
    "strategy": Strategy,
    "trainer": pl.Trainer,
    "module": pl.LightningModule,
    "data": pl.LightningDataModule,
    "checkpoint": pl.Callback,
    "callbacks": pl.Callback,
    "logger": Logger,
}
"""Base class of each group's targets; the last two groups hold any number of objects."""

NEEDED = ("strategy", "trainer", "module")

QUIET: dict[str, Any] = {
    "max_time": None, "limit_val_batches": 0, "num_sanity_val_steps": 0, "profiler": None,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip
"""The trainer's options for steps that are not the run's own."""

AUTO = "auto"
"""The value of `resume` for a run that goes on in its own directory."""


def verify_config(cfg: DictConfig) -> None:
    """Refuse the first mistake in a composed configuration that can be found without instantiating objects."""
    verify_plain(cfg)
    options = plain(cfg)
    if cfg.resume not in (None, "last", "best", AUTO) and not Path(cfg.resume).is_file():
        folder = f"resume={cfg.resume} is a directory. Give a file in it, such as last.ckpt"
        missing = f"resume={cfg.resume} does not exist. Give the path of a checkpoint"
        raise ConfigError(f"{folder if Path(cfg.resume).is_dir() else missing}, or resume=last.")
    if cfg.mode != "plan":  # mode=plan does not need the devices to exist
        resolve_devices(plain(cfg.devices), cfg.accelerator)
    for group, kind in KINDS.items():
        given = options.get(group)
        for key, entry in [(group, given)] if group in NEEDED else entries(group, given):
            verify_options(key, entry, verify_target(key, entry, kind))
    verify_nested("", options)


@dataclass(frozen=True)
class LaunchPlan:
    """How a job is spread over processes: a node's devices, in order, and its processes; None for one process."""

    devices: tuple[torch.device, ...]
    num_processes: int | None

    @classmethod
    def of(cls, cfg: DictConfig) -> "LaunchPlan":
        """Read the plan from a configuration, or refuse devices that don't exist or don't divide into processes."""
        strategy = verify_target("strategy", cfg.strategy, Strategy)
        devices = resolve_devices(plain(cfg.devices), cfg.accelerator)
        options = {key: value for key, value in plain(cfg.strategy).items() if key != "_target_"}
        return cls(tuple(devices), num_processes(strategy, len(devices), options))


def strategy_name(cfg: DictConfig) -> str:
    """The name of the configured strategy: the one that `strategy=` takes, or its class's."""
    cls = verify_target("strategy", cfg.strategy, Strategy)
    return getattr(cls, "strategy_name", cls.__name__)


def entries(group: str, options: Any) -> list[tuple[str, Any]]:
    """List a group's objects as (key, options): the one that a `_target_` makes, or those of `callbacks` by name."""
    if not options:
        return []
    if "_target_" in options or group not in ("callbacks", "logger"):
        return [(group, options)]
    return [(f"{group}.{name}", entry) for name, entry in options.items() if entry is not None]


def verify_target(key: str, options: Any, kind: type) -> type:
    """Import the class that a config's `_target_` names, and refuse one that is not a subclass of `kind`."""
    target = options.get("_target_") if isinstance(options, (dict, DictConfig)) else None
    expected = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__module__.split('.')[0]} {kind.__name__}"
    if not isinstance(target, str):
        raise ConfigError(f"{key}._target_ is missing. Set {key}._target_ to the import path of {expected}.")
    if target.startswith("__main__."):
        raise ConfigError(
            f"{key}._target_={target} can't be imported by workers. Move the class from __main__ to a module."
        )
    found = imported(key, target, kind, expected)
    if is_class(found) and issubclass(found, kind):
        return found
    verify_family(found)
    given = f"the class {found.__module__}.{found.__qualname__}" if is_class(found) else f"a {type(found).__name__}"
    raise ConfigError(f"{key}._target_={target} must be {expected}; got {given}. Give the import path of a subclass.")


def is_class(value: object) -> TypeIs[type[Any]]:
    """Tell whether a value is a class; on Python 3.10 `isinstance(list[int], type)` is true, too."""
    return issubclass(type(value), type)


def imported(key: str, target: str, kind: type = object, expected: str = "a class") -> Any:
    """Import what a dotted path names, or refuse it; of a module without it, the nearest name is told."""
    try:
        return pkgutil.resolve_name(target)
    except Exception as exc:  # whatever the module's code raises
        verify_not_gone(target)
        told = f"{' '.join(str(exc).split())} (searched in {os.getcwd()} and the installed packages)"
        name, _, last = target.rpartition(".")
        names = vars(sys.modules.get(name, type)).items()
        classes = [n for n, value in names if is_class(value) and issubclass(value, kind)]
        raise ConfigError(
            f"{key}._target_={target} can't be imported: {told}. Give the import path of {expected}."
            f"{did_you_mean(last, classes, f'{name}.')}"
        ) from exc


def verify_nested(key: str, options: Any) -> None:
    """Refuse every nested `_target_` that is no class of a package or the user's project, such as `os.system`."""
    children = options.items() if isinstance(options, dict) else enumerate(options) if isinstance(options, list) else ()
    for name, child in children:
        verify_nested(f"{key}.{name}" if key else str(name), child)
    if isinstance(options, dict) and "_target_" in options:
        found = imported(key, target := str(options["_target_"]))
        if not is_class(found) or found.__module__.partition(".")[0] in sys.stdlib_module_names:
            raise ConfigError(
                f"{key}._target_={target} is refused: it must be a class of an installed package or of your project. "
                "Give a class (a module, optimizer, dataset, callback, logger, ...), not a function."
            )


def plain(value: Any) -> Any:
    """Convert an OmegaConf container to plain lists and dicts."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def instantiate(key: str, options: Any, **more: Any) -> Any:
    """Instantiate the object of one config group; `more` arguments replace those of the same name."""
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
    """Instantiate the trainer for steps that are not the run's own; given options replace the configured ones."""
    strategy = strategy or instantiate("strategy", cfg.strategy)
    fixed = {**QUIET, "logger": False, "enable_checkpointing": False, "strategy": strategy}
    return instantiate("trainer", cfg.trainer, **{**fixed, **options})
