"""Convert checkpoints to plain data, so that loading one runs no code, and bring hyperparameters back from it.

Of hyperparameters a checkpoint notes beside the plain data what they were, their kinds:

    hyper_parameters   {"cfg": {"lr": 0.1, "out": 0.1}, "color": "RED"}          what torch.load and Lightning read
    evener_hparams     {"hyper_parameters": [[["cfg"], "config", {"texts": [[["out"], "${lr}"]], …}],
                                             [["color"], "enum", ["colors.Color", None]]]}

A file names kinds and classes; it can choose neither what is imported nor what is called. A class is one that the
module's signature names, an instance is made without calling it, and of interpolations only those come back that name
other keys: a resolver (`${eval:…}`) is the user's code, called with what the file says.
"""

import argparse
import enum
import inspect
import logging
import pathlib
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
import torch
from omegaconf import Container, OmegaConf
from pytorch_lightning.core import saving

from ...strategies.core.errors import ConfigError

logger = logging.getLogger(__name__)

KINDS = "evener_hparams"
"""The key of a checkpoint with the kinds of its hyperparameters, by their entry: path, kind, what else is needed."""
EXACT = "exact_resume"
"""The key of the state that Lightning's checkpoints do not contain, of which no hook learns."""
_Path = tuple[Any, ...]
_Classes = dict[str, type]
"""Classes by their full names."""
_PATHS = {kind.__name__: kind for kind in (pathlib.PurePath, pathlib.PurePosixPath, pathlib.PureWindowsPath)}
_SPACES = {kind.__name__: kind for kind in (argparse.Namespace, types.SimpleNamespace)}
_T = TypeVar("_T")
_PLAIN = (torch.Tensor, str, bytes, bool, int, float, complex, torch.dtype, torch.device, torch.Size, type(None))
_BASES: tuple[Any, ...] = (int, float, str, bytes)
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_told: set[tuple[str, str]] = set()


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
        if key.endswith("hparams_type"):
            continue  # The class of the hyperparameters' container, which is among their kinds.
        noted: list[Any] | None = [] if key in _HYPER_PARAMETERS else None
        plain[key] = _convert(value, (key,), noted)
        if noted:
            kinds[key] = noted
    return {**plain, KINDS: kinds} if kinds else plain


def _convert(value: Any, path: _Path, noted: list[Any] | None) -> Any:
    """Convert a value, and note its kind: `noted` is None outside of hyperparameters, where text is no substitute."""
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if (is_a := described(value)) is not None and (noted is not None or is_a[1] not in ("dataclass", "namespace")):
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
    is_a = described(key)
    return _convert_leaf(key if is_a is None else is_a[0], (*path, key), None)


def described(value: Any) -> tuple[Any, str, Any] | None:
    """Say what a value becomes in a checkpoint, its kind, and what else is needed to restore it; None for other values.

    What it becomes may have others inside that are not plain.
    """
    name = class_name(type(value))
    if isinstance(value, Container):
        plain, texts = _interpolations(value)
        kind: Any = OmegaConf.get_type(value)
        type_name = class_name(kind) if is_dataclass(kind) else None  # pyright: ignore[reportArgumentType]  # never an instance
        flags = {"struct": OmegaConf.is_struct(value), "readonly": OmegaConf.is_readonly(value)}
        return plain, "config", {**flags, "texts": texts, "type": type_name}
    if isinstance(value, enum.Enum):
        number = int(value.value) if isinstance(value, enum.Flag) else None
        return value.name if isinstance(value.name, str) else number, "enum", [name, number]
    if isinstance(value, pathlib.PurePath):
        return str(value), "path", type(value).__name__
    if isinstance(value, timedelta):
        return value.total_seconds(), "timedelta", None
    if isinstance(value, frozenset):
        return set(value), "frozenset", None
    if type(value) in _SPACES.values():
        return vars(value), "namespace", type(value).__name__
    if is_dataclass(value) and not isinstance(value, type):
        state = {each.name: getattr(value, each.name) for each in fields(value) if hasattr(value, each.name)}
        return {**state, **getattr(value, "__dict__", {})}, "dataclass", name
    return None


def class_name(kind: type) -> str:
    """The full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


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
    """The enums and dataclasses that the signature of a class names: annotations, what is in them, and defaults."""
    found: _Classes = {}
    inits = [vars(base).get("__init__") for base in owner.__mro__]
    for init in (init for init in inits if isinstance(init, types.FunctionType)):
        defaults = (type(parameter.default) for parameter in inspect.signature(init).parameters.values())
        for hint in (*_hints(init), *defaults):
            _add(hint, found)
    return found


def _find(classes: _Classes, name: Any, kind: type) -> Any:
    """Find an enum, or a dataclass (`object`), by its name; one of another module has moved, or was in a script."""
    of_name = [found for known, found in classes.items() if known.endswith(f".{name.rpartition('.')[2]}")]
    found = classes.get(name, of_name[0] if len(of_name) == 1 else None)
    if found is None or issubclass(found, enum.Enum) != (kind is enum.Enum):
        raise LookupError(name)
    return found


def _add(hint: Any, found: _Classes) -> None:
    for inner in get_args(hint):
        _add(inner, found)
    is_one = isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, enum.Enum))
    if is_one and class_name(hint) not in found:
        found[class_name(hint)] = hint
        for other in (*_hints(hint), *type.__subclasses__(hint)):
            _add(other, found)


def _hints(owner: Any) -> Iterator[Any]:
    """The annotations of a function or class; those are left out whose names exist for type checkers only."""
    names = vars(sys.modules.get(owner.__module__, types)) | getattr(owner, "__globals__", {})
    for name, hint in getattr(owner, "__annotations__", {}).items():
        with suppress(Exception):
            yield from get_type_hints(types.SimpleNamespace(__annotations__={name: hint}), names).values()


def _expected(value: Any, kind: type[_T] | tuple[type[_T], ...]) -> _T:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _config(value: Any, rest: Any, classes: _Classes) -> Container:
    # escapes what OmegaConf would take for interpolations
    plain = _mapped(_expected(value, (dict, list)), lambda text, _: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))
    for path, text in rest["texts"]:
        if not _names_keys_only(text):
            raise ValueError
        inner = plain
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = text
    config: Any = OmegaConf.create(plain, flags={"allow_objects": True})
    if rest["type"] is not None:
        with suppress(LookupError):  # a DictConfig for whoever did not name it, or has changed it
            config = OmegaConf.merge(OmegaConf.structured(_find(classes, rest["type"], object)), config)
    OmegaConf.set_struct(config, rest["struct"] or None)
    OmegaConf.set_readonly(config, rest["readonly"] or None)
    return config


def _mapped(tree: Any, of_text: Callable[[str, list[Any]], Any], path: Sequence[Any] = ()) -> Any:
    """Replace the texts in nested dicts and lists, each given with its path."""
    if isinstance(tree, dict):
        return {name: _mapped(child, of_text, (*path, name)) for name, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_mapped(child, of_text, (*path, i)) for i, child in enumerate(tree)]
    return of_text(tree, list(path)) if isinstance(tree, str) else tree


def _interpolations(config: Container) -> tuple[Any, list[Any]]:
    """The values of a container, and its texts by their path that name other keys of it."""
    raw = OmegaConf.to_container(config, resolve=False)
    alone = OmegaConf.create(raw, flags={"allow_objects": True})  # what is outside of it is not kept
    texts: list[Any] = []

    def value(text: str, path: list[Any]) -> Any:
        found = _resolved(config, path, text) if "${" in text else text
        if "${" in text and _names_keys_only(text) and _resolved(alone, path, text) == found:
            texts.append([path, text])
        return found

    return _mapped(raw, value), texts


def _resolved(config: Any, path: list[Any], text: str) -> Any:
    """What an interpolation stands for; its text where that is not known."""
    with suppress(Exception):  # a resolver is the user's code
        for step in path:
            config = config[step]
        return OmegaConf.to_container(config, resolve=True) if isinstance(config, Container) else config
    return text


def _names_keys_only(text: str) -> bool:
    while text != (shorter := re.sub(r"\$\{[^:${}]*\}", "", text)):
        text = shorter
    return "${" not in text


def _enum(value: Any, rest: Any, classes: _Classes) -> enum.Enum:
    kind = _find(classes, rest[0], enum.Enum)
    return kind(_expected(rest[1], int)) if issubclass(kind, enum.Flag) else kind.__members__[value]


def _dataclass(value: Any, rest: Any, classes: _Classes) -> Any:
    kind = _find(classes, rest, object)
    made = object.__new__(kind)
    for each in fields(kind):
        if each.name not in _expected(value, dict) and each.default is MISSING:
            make: Any = each.default_factory  # MISSING can't be called, which is told
            value = {**value, each.name: make()}
    for name, each in value.items():
        if isinstance(vars(kind).get(name), types.MemberDescriptorType) or not hasattr(made, "__dict__"):
            object.__setattr__(made, name, each)
        else:
            vars(made)[name] = each
    return made


_RESTORE: dict[str, Callable[[Any, Any, _Classes], Any]] = {
    "config": _config,
    "enum": _enum,
    "dataclass": _dataclass,
    "path": lambda value, rest, _: _PATHS.get(rest, pathlib.Path)(_expected(value, str)),
    "timedelta": lambda value, rest, _: timedelta(seconds=_expected(value, float)),
    "frozenset": lambda value, rest, _: frozenset[Any](_expected(value, set)),
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
