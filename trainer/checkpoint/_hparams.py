"""Convert checkpoints to plain data, so that loading one runs no code, and bring hyperparameters back from it.

Of hyperparameters a checkpoint notes beside the plain data what they were, their kinds:

    hyper_parameters   {"cfg": {"lr": 0.1, "out": 0.1}, "color": "RED"}          what torch.load and Lightning read
    evener_hparams     {"hyper_parameters": [[["cfg"], "config", {"struct": None, "readonly": None}],
                                             [["color"], "enum", ["colors.Color", None]]]}

A file names kinds and classes; it can choose neither what is imported nor what is called. A class is one that the
module's signature names, an instance is made without calling it, and interpolations have the values that they had: a
resolver (`${eval:…}`) is the user's code, called with what the file says.
"""

import argparse
import enum
import logging
import pathlib
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.core import saving

from ...strategies.core.errors import ConfigError

logger = logging.getLogger(__name__)

KINDS = "evener_hparams"
"""The key of a checkpoint with the kinds of its hyperparameters, by their entry: path, kind, what else is needed."""
EXACT = "exact_resume"
"""The key of the state that Lightning's checkpoints do not contain, of which no hook learns."""
_Path = tuple[Any, ...]
_Classes = dict[str, type]
"""Classes by their names, without those of their modules: one may have moved, or was in a script."""
_SPACES = {kind.__name__: kind for kind in (argparse.Namespace, types.SimpleNamespace)}
_PLAIN = (torch.Tensor, str, bytes, bool, int, float, complex, torch.dtype, torch.device, torch.Size, type(None))
_BASES: tuple[Any, ...] = (int, float, str, bytes)
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_told: set[tuple[str, str]] = set()


def class_name(kind: type) -> str:
    """The full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


# To plain data


def to_plain(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a checkpoint to data that `torch.load(..., weights_only=True)` accepts.

    Configurations become dicts and lists, paths and enums strings, numpy values Python numbers and tensors. A
    hyperparameter without a plain form (an object, a function) is replaced by its string form, with a warning.
    Containers are copied; tensors are shared.

    Raises:
        ConfigError: a value can't be converted; the message names it.
    """
    plain: dict[str, Any] = {}
    kinds: dict[str, list[Any]] = {}
    for key, value in checkpoint.items():
        if key.endswith("hparams_type"):  # which is among their kinds
            continue
        noted: list[Any] | None = [] if key in _HYPER_PARAMETERS else None
        plain[key] = _convert(value, (key,), noted)
        if noted:
            kinds[key] = noted
    return {**plain, KINDS: kinds} if kinds else plain


def _convert(value: Any, path: _Path, noted: list[Any] | None) -> Any:
    """Convert a value, and note its kind: `noted` is None outside of hyperparameters, where text is no substitute."""
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if (is_a := _described(value)) is not None and (noted is not None or is_a[1] not in ("dataclass", "namespace")):
        plain = _convert(is_a[0], path, noted)
        if noted is not None:
            noted.append([list(path[1:]), *is_a[1:]])
        return plain
    if isinstance(value, Mapping):
        keys = {key: _convert_key(key, path) for key in value}
        items = {keys[k]: _convert(v, (*path, keys[k]), noted) for k, v in value.items()}
        return OrderedDict(items) if isinstance(value, OrderedDict) else items
    if isinstance(value, (list, tuple)):
        children = [_convert(child, (*path, i), noted) for i, child in enumerate(value)]
        return tuple(children) if isinstance(value, tuple) else children
    if isinstance(value, set):
        lost: list[Any] | None = None if noted is None else []  # its elements have no place
        elements = {_convert(child, (*path, child), lost) for child in value}
        if noted is not None and lost:
            noted.append([list(path[1:]), "text", "set"])
        return elements
    return _convert_leaf(value, path, noted)


def _convert_leaf(value: Any, path: _Path, noted: list[Any] | None) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    for base in _BASES:
        if isinstance(value, base):
            return base(value)
    where = ".".join(map(str, path))
    if noted is not None:
        noted.append([list(path[1:]), "text", class_name(type(value))])
        text = repr(value)
        if (where, text) not in _told:
            _told.add((where, text))
            logger.warning("The hyperparameter %s is stored as a string: %s is not plain data.", where, text)
        return text
    raise ConfigError(
        f"The checkpoint's entry {where} has type {class_name(type(value))}, but "
        "a checkpoint may contain only tensors, numbers, strings and containers of these, so loading runs no code. "
        "Return such values from state_dict() and on_save_checkpoint()."
    )


def _convert_key(key: Any, path: _Path) -> Any:
    if isinstance(key, tuple):
        return tuple(_convert_key(part, path) for part in key)
    if isinstance(key, type) and path == ("callbacks",):
        return class_name(key)  # which `resume_start` knows again
    if type(key) in _PLAIN:
        return key
    is_a = _described(key)
    return _convert_leaf(key if is_a is None else is_a[0], (*path, key), None)


def _described(value: Any) -> tuple[Any, str, Any] | None:
    """Say what a value becomes, its kind, and what else is needed to restore it; None for other values.

    What it becomes may have others inside that are not plain.
    """
    match value:
        case Container():
            flags = {"struct": OmegaConf.is_struct(value), "readonly": OmegaConf.is_readonly(value)}
            return _values_of(value), "config", flags
        case enum.Enum():
            number = int(value.value) if isinstance(value, enum.Flag) else None
            return value.name if isinstance(value.name, str) else number, "enum", [class_name(type(value)), number]
        case pathlib.PurePath():
            return str(value), "path", None
        case timedelta():
            return value.total_seconds(), "timedelta", None
        case frozenset():
            return set(value), "frozenset", None
        case argparse.Namespace() | types.SimpleNamespace() if type(value) in _SPACES.values():
            return vars(value), "namespace", type(value).__name__
        case _ if is_dataclass(value) and not isinstance(value, type):
            state = {each.name: getattr(value, each.name) for each in fields(value) if hasattr(value, each.name)}
            return {**state, **getattr(value, "__dict__", {})}, "dataclass", class_name(type(value))
        case _:
            return None


def _values_of(config: Container) -> Any:
    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:  # what an interpolation names is not there
        return OmegaConf.to_container(config, resolve=False)


# And back


def restored(checkpoint: Mapping[str, Any], owner: type, given: Collection[str] = ()) -> dict[str, Any]:
    """Return a checkpoint with the hyperparameters of a module or datamodule as they were, without their kinds.

    Args:
        owner: the class whose signature names the classes of enums and dataclasses.
        given: names of hyperparameters that are given, in place of the checkpoint's.
    """
    key: str = getattr(owner, "CHECKPOINT_HYPER_PARAMS_KEY", "")
    kinds = dict(checkpoint.get(KINDS) or ()) if isinstance(checkpoint.get(KINDS), Mapping) else {}
    found: dict[_Path, tuple[str, Any]] = {}
    with suppress(TypeError, ValueError):  # made by somebody else
        found = {tuple(path): (kind, rest) for path, kind, rest in kinds.pop(key, ())}
    found = {path: what for path, what in found.items() if not path or path[0] not in given}
    left = {name: value for name, value in checkpoint.items() if name != KINDS} | ({KINDS: kinds} if kinds else {})
    return {**left, key: _restore(left[key], (), found, _classes_of(owner) if found else {})} if key in left else left


def _restore(value: Any, path: _Path, kinds: Mapping[_Path, tuple[str, Any]], classes: _Classes) -> Any:
    if type(value) in (dict, OrderedDict):
        value = type(value)((name, _restore(child, (*path, name), kinds, classes)) for name, child in value.items())
    elif type(value) in (list, tuple):
        value = type(value)(_restore(child, (*path, i), kinds, classes) for i, child in enumerate(value))
    if path not in kinds:
        return value
    kind, rest = kinds[path]
    try:
        return _RESTORE[kind](value, rest, classes)
    except Exception:  # noqa: BLE001  # a file may say anything, and a class may have changed
        what = rest[0] if kind == "enum" and isinstance(rest, list) else rest if isinstance(rest, str) else kind
        logger.warning(
            "The hyperparameter %s was a %s; it is loaded as %r. Give it to load_from_checkpoint.",
            ".".join(map(str, path)), what, value,
        )  # fmt: skip
        return value


def _classes_of(owner: type) -> _Classes:
    """The enums and dataclasses that the signature of a class names, those in their fields, and their subclasses."""
    hints = [hint for base in owner.__mro__ for hint in _hints(vars(base).get("__init__"))]
    found: _Classes = {}
    for hint in hints:  # which grows
        hints += get_args(hint)
        is_one = isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, enum.Enum))
        if is_one and hint.__name__ not in found:
            found[hint.__name__] = hint
            hints += [*_hints(hint), *type.__subclasses__(hint)]
    return found


def _hints(owner: Any) -> list[Any]:
    with suppress(Exception):  # a name that exists for type checkers only, or nothing that has annotations
        return list(get_type_hints(owner).values())
    return []


def _config(value: Any, rest: Any, _: _Classes) -> Container:
    if not isinstance(value, (dict, list)) or "${" in repr(value):
        raise ValueError
    config = OmegaConf.create(value, flags={"allow_objects": True})
    OmegaConf.set_struct(config, rest["struct"] or None)
    OmegaConf.set_readonly(config, rest["readonly"] or None)
    return config


def _enum(value: Any, rest: Any, classes: _Classes) -> Any:
    kind: Any = classes[rest[0].rpartition(".")[2]]
    return kind(rest[1]) if issubclass(kind, enum.Flag) else kind.__members__[value]


def _dataclass(value: Any, rest: Any, classes: _Classes) -> Any:
    kind: Any = classes[rest.rpartition(".")[2]]
    if {each.name for each in fields(kind)} - value.keys():
        raise LookupError
    made = object.__new__(kind)
    for name, each in value.items():
        object.__setattr__(made, name, each)
    return made


_RESTORE: dict[str, Callable[[Any, Any, _Classes], Any]] = {
    "config": _config,
    "enum": _enum,
    "dataclass": _dataclass,
    "path": lambda value, rest, _: pathlib.Path(value),
    "timedelta": lambda value, rest, _: timedelta(seconds=value),
    "frozenset": lambda value, rest, _: frozenset[Any](value),
    "namespace": lambda value, rest, _: _SPACES[rest](**value),
}


_load_state = saving._load_state


@wraps(_load_state)
def _load_restored(cls: Any, checkpoint: dict[str, Any], strict: bool | None = None, **given: Any) -> Any:
    """Have Lightning's `load_from_checkpoint` make the module with the hyperparameters that were saved."""
    back = restored(checkpoint, cls, given)
    back.pop(EXACT, None)
    hparams = back.get(cls.CHECKPOINT_HYPER_PARAMS_KEY)
    if isinstance(hparams, Container):  # Lightning gives it what it has resolved
        back[cls.CHECKPOINT_HYPER_PARAMS_TYPE] = lambda _: hparams  # pyright: ignore[reportUnknownLambdaType]
    return _load_state(cls, back, strict=strict, **given)


saving._load_state = _load_restored
