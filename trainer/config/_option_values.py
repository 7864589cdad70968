"""Check the options of a configuration by the annotations of the constructors that will get them."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import pytorch_lightning as pl

from ...strategies import ConfigError
from ...strategies.core.options import Count, Limit, Natural, NotNegative, Positive, hints_of, verify_value
from .nearest import did_you_mean

_FromMinusOne: TypeAlias = Annotated[int, Limit(">=", -1)]


def _or_null(hint: Any) -> Any:
    return hint | None


ROOT: dict[str, Any] = {
    "name": str,
    "log_dir": str,
    "run_dir": str,
    "tags": list[str],
    "notes": str | None,
    "num_nodes": Count,
    "seed": _or_null(Annotated[int, Limit(">=", 0), Limit("<", 2**32)]),  # numpy's limit
    "resume": str | None,
    "config": _or_null(Literal["run"]),
    "compile": bool,
    "test_after_fit": bool,
    "monitor": str | None,
    "device_memory_gb": _or_null(Positive),
    "compare.strategies": list[str] | None,
    "compare.steps": int,
    "compare.warmup_steps": int,
    "compare.timeout_s": Positive,
    "compare.options": dict[str, Any],
    "launcher.max_restarts": Natural,
    "launcher.min_processes": _or_null(Count),
    "launcher.monitor_interval_s": Positive,
    "launcher.shutdown_timeout_s": NotNegative,
}
"""Options of the whole run, of `mode=compare` and of the launcher."""

NARROWER: dict[str, Any] = {
    "trainer.devices": int | str | list[int | str],
    "trainer.max_epochs": _or_null(_FromMinusOne),
    "trainer.max_steps": _FromMinusOne,
    "trainer.log_every_n_steps": _or_null(Natural),
    "trainer.val_check_interval": _or_null(Positive),
    "trainer.check_val_every_n_epoch": _or_null(Count),
    "trainer.num_sanity_val_steps": _or_null(_FromMinusOne),
    "trainer.accumulate_grad_batches": Count,
    "trainer.gradient_clip_val": _or_null(NotNegative),
    "callbacks.early_stopping.patience": Natural,
    "data.batch_size": Count,  # limits of `data` hold for whole numbers given to users' own data modules, too
    "data.num_workers": Natural,
    "module.lr": NotNegative,
}
"""Options that take more or less than the annotations of their classes say."""

SEARCHED = {"data.batch_size": "auto"}
"""Keywords that are replaced before the class is constructed."""

MADE_ELSEWHERE = {
    "strategy": "strategy=<name>",
    "logger": "logger=<name>, or logger=none",
    "callbacks": "callbacks=<name>, or +callbacks.mine._target_=<class>",
    "enable_checkpointing": "checkpoint=<name>, or checkpoint=none",
}
"""Arguments of the trainer that have their own config groups."""


def verify_root(options: Mapping[str, Any]) -> None:
    """Refuse the first value of the root options of a resolved configuration that is not allowed."""
    precision = annotations(pl.Trainer)["precision"][0]
    for key, hint in {**ROOT, "precision": precision}.items():
        group, _, name = key.rpartition(".")
        if not group or name in (options.get(group) or {}):
            verify_value(key, _whole(options[group][name] if group else options[name]), hint)
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
            verify_value(path, _whole(value), hint)


def _whole(value: Any) -> Any:
    """A number without a fraction, as the command line reads 2e3, as the whole number that it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
