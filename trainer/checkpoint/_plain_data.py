"""Convert checkpoints to plain data (tensors, numbers, strings and containers), so that loading one runs no code."""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...strategies.core.errors import ConfigError
from ._hparams import KINDS, class_name, described

logger = logging.getLogger(__name__)

_PLAIN = (torch.Tensor, str, bytes, bool, int, float, complex, torch.dtype, torch.device, torch.Size, type(None))
_BASES: tuple[Any, ...] = (int, float, str, bytes)
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_told: set[tuple[str, str]] = set()


def to_plain(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a checkpoint to data that `torch.load(..., weights_only=True)` accepts.

    Configurations become dicts and lists, paths and enums strings, numpy values Python numbers and tensors. Of
    hyperparameters it is noted what they were (`_hparams.py`); one without a plain form (an object, a function) is
    replaced by its string form, with a warning. Containers are copied; tensors are shared.

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


def _convert(value: Any, path: tuple[Any, ...], noted: list[Any] | None) -> Any:
    """Convert a value, and note its kind: `noted` is None outside of hyperparameters, where text is no substitute."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, torch.Tensor):
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


def _convert_leaf(value: Any, path: tuple[Any, ...], noted: list[Any] | None) -> Any:
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
        _tell(where, repr(value))
        return repr(value)
    raise ConfigError(
        f"The checkpoint's entry {where} has type {type(value).__module__}.{type(value).__qualname__}, but "
        "a checkpoint may contain only tensors, numbers, strings and containers of these, so loading runs no code. "
        "Return such values from state_dict() and on_save_checkpoint()."
    )


def _tell(where: str, text: str) -> None:
    if (where, text) not in _told:
        _told.add((where, text))
        logger.warning("The hyperparameter %s is stored as a string: %s is not plain data.", where, text)


def _convert_key(key: Any, path: tuple[Any, ...]) -> Any:
    if isinstance(key, tuple):
        return tuple(_convert_key(part, path) for part in key)
    if isinstance(key, type) and path == ("callbacks",):
        return class_name(key)  # which `resume_start` knows again
    if type(key) in _PLAIN:
        return key
    is_a = described(key)
    return _convert_leaf(key if is_a is None else is_a[0], (*path, key), None)
