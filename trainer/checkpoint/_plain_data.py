"""Convert checkpoints to plain data (tensors, numbers, strings and containers), so that loading one runs no code."""

import enum
import logging
from collections import OrderedDict
from collections.abc import Mapping
from datetime import timedelta
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from omegaconf import Container, OmegaConf

from ...strategies.core.errors import ConfigError

logger = logging.getLogger(__name__)

_PLAIN = (torch.Tensor, str, bytes, bool, int, float, complex, torch.dtype, torch.device, torch.Size, type(None))
_BASES: tuple[Any, ...] = (int, float, str, bytes)
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


def to_plain(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a checkpoint to data that `torch.load(..., weights_only=True)` accepts.

    Configurations become dicts and lists, paths and enums strings, numpy values Python numbers and tensors.
    Hyperparameters without a plain form (objects, functions) are replaced by their string form, with a warning.

    Args:
        checkpoint: nested dicts, lists and tuples.

    Returns:
        A copy of the containers; tensors are shared, not copied.

    Raises:
        ConfigError: a value can't be converted; the message names it.
    """
    plain: dict[str, Any] = {}
    for key, value in checkpoint.items():
        if key.endswith("hparams_type"):
            continue  # The class of the hyperparameters' container, which is now a dict.
        plain[key] = _convert(value, (key,), lenient=key in _HYPER_PARAMETERS)
    return plain


def _convert(value: Any, path: tuple[Any, ...], lenient: bool) -> Any:
    kind = type(value)
    if kind in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Container):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        items = {_convert_key(k, path): _convert(v, (*path, k), lenient) for k, v in value.items()}
        return OrderedDict(items) if isinstance(value, OrderedDict) else items
    if isinstance(value, (list, tuple)):
        children = [_convert(child, (*path, i), lenient) for i, child in enumerate(value)]
        return tuple(children) if isinstance(value, tuple) else children
    if isinstance(value, (set, frozenset)):
        return {_convert(child, path, lenient) for child in value}
    return _convert_leaf(value, path, lenient)


def _convert_leaf(value: Any, path: tuple[Any, ...], lenient: bool) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    if isinstance(value, (PurePath, enum.Enum)):
        return value.name if isinstance(value, enum.Enum) else str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    for base in _BASES:
        if isinstance(value, base):
            return base(value)
    where = ".".join(map(str, path))
    if lenient:
        logger.warning("The hyperparameter %s is stored as a string: %r is not plain data.", where, value)
        return repr(value)
    raise ConfigError(
        f"The checkpoint's entry {where} has type {type(value).__module__}.{type(value).__qualname__}, but "
        "a checkpoint may contain only tensors, numbers, strings and containers of these, so loading runs no code. "
        "Return such values from state_dict() and on_save_checkpoint()."
    )


def _convert_key(key: Any, path: tuple[Any, ...]) -> Any:
    if isinstance(key, tuple):
        return tuple(_convert_key(part, path) for part in key)
    return key if type(key) in _PLAIN else _convert_leaf(key, (*path, key), lenient=False)
