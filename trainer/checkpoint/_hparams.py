"""Convert checkpoints to plain data, so that loading one runs no code, and have Lightning load modules from them.

Of hyperparameters that were not plain data a checkpoint notes the kinds beside them:

    hyper_parameters   {"cfg": {"lr": 0.1, "out": 0.1}, "color": 2}          what torch.load and Lightning read
    evener_hparams     {"hyper_parameters": [[["cfg"], "config", {"struct": None, "readonly": None}],
                                             [["color"], "colors.Color", None]]}

Configurations and paths come back as what they were, without resolving what a file says (`${eval:…}`); all others are
loaded as the plain data, with a warning that names them.
"""

import enum
import logging
import pathlib
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, reduce, wraps
from operator import getitem
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.core import saving

from ...strategies.core.errors import ConfigError
from ...strategies.sharding.whole import map_tensors
from .file_io import SHARDS, read

logger = logging.getLogger(__name__)

KINDS = "evener_hparams"
EXACT = "exact_resume"  # the key of the state that Lightning's checkpoints do not contain, of which no hook learns
_PLAIN = (torch.Tensor, str, bytes, bool, int, float, complex, torch.dtype, torch.device, torch.Size, type(None))
_BASES: tuple[Any, ...] = (int, float, str, bytes)


def to_plain(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a checkpoint to data that `torch.load(..., weights_only=True)` accepts.

    Configurations become dicts and lists, paths strings, enums their values, numpy values Python numbers and tensors. A
    hyperparameter without a plain form (an object, a function) is replaced by its string form, with a warning.
    Containers are copied; tensors are shared.

    Raises:
        ConfigError: a value can't be converted; the message names it.
    """
    plain: dict[str, Any] = {}
    kinds: dict[str, list[Any]] = {}
    for key, value in checkpoint.items():
        if not key.endswith("hparams_type"):  # which is among their kinds
            noted: list[Any] | None = [] if key in ("hyper_parameters", "datamodule_hyper_parameters") else None
            plain[key] = _convert(value, (key,), noted)
            kinds |= {key: noted} if noted else {}
    return {**plain, KINDS: kinds} if kinds else plain


def _convert(value: Any, path: tuple[Any, ...], noted: list[Any] | None) -> Any:
    """Convert a value, and note its kind: `noted` is None outside of hyperparameters, where text is no substitute."""
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping) and not isinstance(value, Container):
        keys = {key: _convert(key, (*path, key), None) for key in value}
        return {keys[key]: _convert(child, (*path, keys[key]), noted) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        children = [_convert(child, (*path, i), noted) for i, child in enumerate(value)]
        return tuple(children) if isinstance(value, tuple) else children
    if isinstance(value, set):  # whose elements have no place
        return {_convert(child, (*path, child), None) for child in value}
    name, kind, rest = ".".join(map(str, path)), f"{type(value).__module__}.{type(value).__qualname__}", None
    if isinstance(value, Container):
        kind, rest = "config", {"struct": OmegaConf.is_struct(value), "readonly": OmegaConf.is_readonly(value)}
        try:
            simpler: Any = OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException:  # what an interpolation names is not there
            simpler = OmegaConf.to_container(value, resolve=False)
    elif isinstance(value, pathlib.PurePath):
        kind, simpler = "path", str(value)
    elif isinstance(value, enum.Enum):
        simpler = value.value
    elif base := next((base for base in _BASES if isinstance(value, base)), None):
        return base(value)
    elif noted is None:
        raise ConfigError(
            f"The checkpoint's entry {name} has type {kind}, but "
            "a checkpoint may contain only tensors, numbers, strings and containers of these, so loading runs no code. "
            "Return such values from state_dict() and on_save_checkpoint()."
        )
    elif isinstance(value, (Namespace, SimpleNamespace)):
        simpler = vars(value)
    elif is_dataclass(value) and not isinstance(value, type):
        simpler = {one.name: getattr(value, one.name, None) for one in fields(value)}
    else:
        _tell(name, simpler := repr(value))
    plain = _convert(simpler, path, noted)
    if noted is not None:
        noted.append([list(path[1:]), kind, rest])
    return plain


@cache
def _tell(where: str, text: str) -> None:
    logger.warning("The hyperparameter %s is stored as a string: %s is not plain data.", where, text)


def _revive(hparams: Any, path: list[Any], kind: str, rest: Any) -> None:
    """Make a hyperparameter what it was, in its place, or say that it is not."""
    holder = reduce(getitem, path[:-1], hparams)
    value = holder[path[-1]]
    try:
        if kind == "path":
            holder[path[-1]] = pathlib.Path(value)
            return
        if kind == "config" and isinstance(value, (dict, list)) and "${" not in repr(value):
            config = OmegaConf.create(value, flags={"allow_objects": True})
            OmegaConf.set_struct(config, rest["struct"] or None)
            OmegaConf.set_readonly(config, rest["readonly"] or None)
            holder[path[-1]] = config
            return
    except Exception:  # noqa: BLE001  # it is in a tuple, or a file says anything
        pass
    told = "The hyperparameter %s was a %s; it is loaded as %r. Give it to load_from_checkpoint."
    logger.warning(told, ".".join(map(str, path[1:])), kind, value)


_pl_load: Any = saving.pl_load
_load_state = saving._load_state


@wraps(_pl_load)
def _load_whole(path: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Have Lightning's `load_from_checkpoint` read checkpoints whose tensors are in a file of shards."""
    checkpoint: dict[str, Any] = _pl_load(path, map_location, *args, **kwargs)
    if SHARDS not in checkpoint:
        return checkpoint
    moves = isinstance(map_location, (str, torch.device))
    return map_tensors(read(path), lambda tensor: tensor.to(map_location) if moves else tensor)


@wraps(_load_state)
def _load_restored(cls: Any, checkpoint: dict[str, Any], strict: bool | None = None, **given: Any) -> Any:
    """Have Lightning's `load_from_checkpoint` make the module with the hyperparameters that were saved."""
    key: str = getattr(cls, "CHECKPOINT_HYPER_PARAMS_KEY", "")
    back = {name: value for name, value in checkpoint.items() if name not in (KINDS, EXACT)}
    if key in back:
        whole = [back[key]]
        with suppress(LookupError, TypeError, ValueError):  # there are none, or it was made by somebody else
            for path, kind, rest in checkpoint[KINDS][key]:  # what is inside comes before what it is in
                if not path or path[0] not in given:
                    _revive(whole, [0, *path], kind, rest)
        back[key] = whole[0]
        if isinstance(back[key], Container):  # Lightning gives it what it has resolved
            back[cls.CHECKPOINT_HYPER_PARAMS_TYPE] = lambda _: whole[0]  # pyright: ignore[reportUnknownLambdaType]
    return _load_state(cls, back, strict=strict, **given)


saving.pl_load = _load_whole
saving._load_state = _load_restored
