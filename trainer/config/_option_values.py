"""Check the values of options: types against the constructor's annotations, numbers against their limits."""

import inspect
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytorch_lightning as pl

from ...strategies import ConfigError
from .descriptions import as_given
from .nearest import did_you_mean

ROOT: dict[str, Any] = {
    "name": str,
    "log_dir": str,
    "run_dir": str,
    "tags": list[str],
    "notes": str | None,
    "num_nodes": int,
    "precision": get_type_hints(inspect.unwrap(pl.Trainer.__init__))["precision"],
    "seed": int | None,
    "resume": str | None,
    "config": Literal["run"] | None,
    "compile": bool,
    "test_after_fit": bool,
    "monitor": str | None,
    "device_memory_gb": float | None,
    "compare.strategies": list[str] | None,
    "compare.steps": int,
    "compare.warmup_steps": int,
    "compare.timeout_s": float,
    "compare.options": dict[str, Any],
    "launcher.max_restarts": int,
    "launcher.min_processes": int | None,
    "launcher.monitor_interval_s": float,
    "launcher.shutdown_timeout_s": float,
}
"""Types of the root options, which are not arguments of a class."""

LIMITS: dict[str, tuple[str, int]] = {
    "num_nodes": (">=", 1),
    "seed": (">=", 0),
    "device_memory_gb": (">", 0),
    "compare.timeout_s": (">", 0),
    "launcher.max_restarts": (">=", 0),
    "launcher.min_processes": (">=", 1),
    "launcher.monitor_interval_s": (">", 0),
    "launcher.shutdown_timeout_s": (">=", 0),
    "trainer.max_epochs": (">=", -1),
    "trainer.max_steps": (">=", -1),
    "trainer.log_every_n_steps": (">=", 0),
    "trainer.val_check_interval": (">", 0),
    "trainer.check_val_every_n_epoch": (">=", 1),
    "trainer.num_sanity_val_steps": (">=", -1),
    "trainer.accumulate_grad_batches": (">=", 1),
    "trainer.gradient_clip_val": (">=", 0),
    "callbacks.early_stopping.patience": (">=", 0),
    "logger.tensorboard.flush_secs": (">", 0),
    "data.batch_size": (">=", 1),
    "data.num_workers": (">=", 0),
    "module.lr": (">=", 0),
}
"""Limits of numbers that no class of this project checks itself."""

LIMITED_EVERYWHERE = ("data.batch_size", "data.num_workers")
"""Options whose limits also hold for whole numbers given to users' own classes."""

LARGEST_SEED = 2**32 - 1  # numpy's

SEARCHED = {"data.batch_size": "auto"}
"""Keywords that are replaced before the class is constructed."""

WIDER: dict[str, Any] = {"trainer.devices": int | str | list[int | str]}
"""Options that take more than Lightning's annotation says."""

MADE_ELSEWHERE = {
    "strategy": "strategy=<name>",
    "logger": "logger=<name>, or logger=none",
    "callbacks": "callbacks=<name>, or +callbacks.mine._target_=<class>",
    "enable_checkpointing": "checkpoint=<name>, or checkpoint=none",
}
"""Arguments of the trainer that have their own config groups."""

WORDS = {int: "a whole number", float: "a number", str: "text", type(None): "null"}


def verify_root(options: Mapping[str, Any]) -> None:
    """Check the values of the root options.

    Args:
        options: the whole resolved configuration, as plain dicts.

    Raises:
        ConfigError: the first value that is not allowed.
    """
    for key, hint in ROOT.items():
        value: Any = options
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None or "." not in key:
            verify_value(key, value, hint)
    if options["seed"] is not None and options["seed"] > LARGEST_SEED:
        raise ConfigError(f"seed={options['seed']} is too large. Give at most {LARGEST_SEED}, or null.")
    for key in ("log_dir", "run_dir"):
        if not options[key]:
            raise ConfigError(f"{key} is empty. Give the path of a directory.")
    path = Path(options["name"])
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            f"name={options['name']!r} must be a relative path within log_dir. Give a name, or a path such as "
            "name=digits/mine."
        )


def verify_options(key: str, options: Mapping[str, Any], cls: type) -> None:
    """Check the values of a class's options against its constructor's annotations.

    Only annotations of this project's and Lightning's classes are checked: others may be meant less strictly.

    Args:
        options: its options as plain data; those with a `_target_` of their own are checked separately.

    Raises:
        ConfigError: the first value that is not allowed, or a trainer option that has its own group.
    """
    if issubclass(cls, pl.Trainer):
        for name in options.keys() & MADE_ELSEWHERE:
            raise ConfigError(
                f"{key}.{name} would be ignored: it has its own config group. Use {MADE_ELSEWHERE[name]}."
            )
    verify_names(key, options, cls)
    parameters = annotations(cls)
    for name, value in options.items():
        if f"{key}.{name}" in LIMITED_EVERYWHERE and type(value) is int:
            verify_value(f"{key}.{name}", value, int)
        if name in parameters and SEARCHED.get(f"{key}.{name}", ...) != value:
            hint, default = parameters[name]
            hint = WIDER.get(f"{key}.{name}", hint)
            verify_value(f"{key}.{name}", value, Any if value is default or value == default else hint)


def verify_names(key: str, options: Mapping[str, Any], cls: type) -> None:
    """Check that a class's constructor takes the options, and gets those that have no default.

    Raises:
        ConfigError: an option that the constructor does not take, or one that it needs is missing.
    """
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a class that does not tell
        return
    kinds = {parameter.kind for parameter in parameters.values()}
    given = [name for name in options if not (name.startswith("_") and name.endswith("_"))]
    named = f"{cls.__module__}.{cls.__qualname__}"
    unknown = [name for name in given if name not in parameters]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        takes = f" It takes {', '.join(parameters)}." if parameters else " It takes no options."
        suggestion = did_you_mean(unknown[0], parameters, f"{key}.")
        raise ConfigError(f"{key}.{unknown[0]} is not an option of {named}.{suggestion or takes}")
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind not in variable]
    missing = [name for name in needed if name not in given]
    if missing and "_args_" not in options:
        raise ConfigError(
            f"{key}: {named} needs {', '.join(missing)}. Give {' '.join(f'+{key}.{name}=<value>' for name in missing)}."
        )


def verify_value(key: str, value: Any, hint: Any) -> None:
    """Check one value.

    Raises:
        ConfigError: it has another type, or is too small.
    """
    if not allows(hint, value):
        raise ConfigError(f"{key}={as_given(value)} is not allowed. Give {describe(hint)}.")
    if not isinstance(value, (int, float)) or hint is Any or key not in LIMITS:
        return
    sign, limit = LIMITS[key]
    if value < limit or (sign == ">" and not value > limit):
        raise ConfigError(
            f"{key}={value} is too small. Give {f'{limit} or more' if sign == '>=' else f'more than {limit}'}."
        )


def annotations(cls: type) -> dict[str, tuple[Any, Any]]:
    """Types and defaults of a class's constructor arguments, including those passed on as `**options`."""
    found: dict[str, tuple[Any, Any]] = {}
    for owner in (base for base in cls.__mro__ if "__init__" in vars(base)):
        init: Any = inspect.unwrap(vars(owner)["__init__"])
        parameters = inspect.signature(init).parameters if inspect.isfunction(init) else {}
        if owner.__module__.startswith(("evener.", f"{pl.__name__}.")):
            hints = _hints(init)
            for name, parameter in parameters.items():  # the trainer's signature also has Lightning's arguments
                hint = hints.get(name, parameter.annotation)
                if hint is not parameter.empty and not isinstance(hint, str):
                    found.setdefault(name, (hint, parameter.default))
            grouped: type | None = vars(owner).get("option_group")
            if grouped is not None:  # options that the class takes one by one for a dataclass
                found |= {name: (hint, ...) for name, hint in get_type_hints(grouped).items() if name not in found}
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found


def _hints(init: Any) -> dict[str, Any]:
    try:
        return get_type_hints(init)
    except NameError:  # a name imported only under TYPE_CHECKING
        return {}


def allows(hint: Any, value: Any) -> bool:
    """Whether a type accepts a plain value; a dict with a `_target_` may become any object."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if hint is Any or (isinstance(value, dict) and "_target_" in value):
        return True
    if kind in (Union, types.UnionType):
        return any(allows(argument, value) for argument in arguments)
    if kind is Literal:
        return any(value == argument and type(value) is type(argument) for argument in arguments)
    if kind is None or value is None:
        return kind in (None, type(None))
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    if isinstance(value, (bool, str)):
        return kind is type(value) or (kind is Path and isinstance(value, str))
    if isinstance(value, (int, float)):
        return kind is float or (kind is int and float(value).is_integer())
    if isinstance(value, list):
        fits = kind is tuple or issubclass(list, kind)
        return fits and (kind is tuple or all(allows(argument, item) for argument in arguments for item in value))
    return isinstance(value, kind)


def describe(hint: Any) -> str:
    """Describe in words what a type allows."""
    words = list(dict.fromkeys(_words(hint)))
    if WORDS[float] in words and WORDS[int] in words:
        words.remove(WORDS[int])
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _words(hint: Any) -> Iterator[str]:
    kind = get_origin(hint) or hint
    if kind in (Union, types.UnionType):
        for argument in get_args(hint):
            yield from _words(argument)
    elif kind is Literal:
        yield from map(as_given, get_args(hint))
    elif isinstance(kind, type) and issubclass(kind, Mapping):
        yield "a mapping"
    elif isinstance(kind, type) and (kind is tuple or issubclass(list, kind)):
        yield f"a list (each {describe(get_args(hint)[0])})" if get_args(hint) else "a list"
    elif kind is bool:
        yield from ("true", "false")
    else:
        yield WORDS.get(kind, getattr(kind, "__name__", str(kind)))
