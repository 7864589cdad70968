"""Check the options of a configuration by the annotations of the constructors that will get them."""

import inspect
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl

from ...strategies import ConfigError
from ...strategies.core.options import hints_of, verify_value
from .nearest import did_you_mean, verify_not_gone
from .plain_values import NARROWER, SEARCHED, whole

MADE_ELSEWHERE = {
    "strategy": "strategy=<name>",
    "logger": "logger=<name>, or logger=none",
    "callbacks": "callbacks=<name>, or +callbacks.mine._target_=<class>",
    "enable_checkpointing": "checkpoint=<name>, or checkpoint=none",
}
"""Arguments of the trainer that have their own config groups."""


def verify_options(key: str, options: Mapping[str, Any], cls: type) -> None:
    """Check the values of a class's options against its constructor's annotations.

    Only annotations of this project's and Lightning's classes are checked: others may be meant less strictly.
    """
    if issubclass(cls, pl.Trainer):
        for name in options.keys() & MADE_ELSEWHERE:
            raise ConfigError(
                f"{key}.{name} would be ignored: it has its own config group. Use {MADE_ELSEWHERE[name]}."
            )
    verify_names(key, options, cls)
    parameters = annotations(cls)
    for name, value in options.items():
        path = f"{key}.{name}"
        hint, default = parameters.get(name, (Any, ...))
        if name in parameters or (key == "data" and type(value) is int):
            hint = NARROWER.get(path, hint)
        if value != default and SEARCHED.get(path, ...) != value:
            verify_value(path, whole(value), hint)


def verify_names(key: str, options: Mapping[str, Any], cls: type) -> None:
    """Refuse options that a class's constructor does not take, and the lack of those that it needs."""
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a class that does not tell
        return
    kinds = {parameter.kind for parameter in parameters.values()}
    given = [name for name in options if not (name.startswith("_") and name.endswith("_"))]
    named = f"{cls.__module__}.{cls.__qualname__}"
    # of this project's strategies it is known what they take as `**options`
    declared = annotations(cls) if hasattr(cls, "further_options") and cls.__module__.startswith("evener.") else {}
    known = list(dict.fromkeys([*(name for name in parameters if name != "options" or not declared), *declared]))
    unknown = [name for name in given if name not in known]
    for name in unknown:
        verify_not_gone(f"{key}.{name}")
    if unknown and (declared or inspect.Parameter.VAR_KEYWORD not in kinds):
        takes = f" It takes {', '.join(known)}." if known else " It takes no options."
        suggestion = did_you_mean(unknown[0], known, f"{key}.")
        raise ConfigError(f"{key}.{unknown[0]} is not an option of {named}.{suggestion or takes}")
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind not in variable]
    missing = [name for name in needed if name not in given]
    if missing and "_args_" not in options:
        raise ConfigError(
            f"{key}: {named} needs {', '.join(missing)}. Give {' '.join(f'+{key}.{name}=<value>' for name in missing)}."
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
            further: dict[str, Any] = vars(owner).get("further_options", {})  # of its `**options`
            found |= {name: (hint, ...) for name, hint in further.items() if name not in found}
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found
