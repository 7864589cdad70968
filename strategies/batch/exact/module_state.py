"""See what a step leaves in a module: parameters, buffers and plain attributes that it has written, by name."""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from ...core.module_checks import is_plain, own_parts

_OWN = frozenset(vars(pl.LightningModule()))
"""Attributes that every module has."""
_CONTAINERS = (list, dict, OrderedDict, deque, set, tuple)
_MOST_ELEMENTS = 4096
"""Of a container whose elements are compared."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


@dataclass
class Written:
    """A value that a module keeps.

    Args:
        owner: the dictionary that holds it: a module's parameters, buffers or attributes.
        value: the object, whose contents a step may change.
        contents: a copy.
        is_saved: whether checkpoints hold it.
    """

    owner: dict[str, Any]
    key: str
    value: Any
    contents: Any
    is_saved: bool

    def is_still(self, value: Any) -> bool:
        """Whether a value is the same object, with the same contents."""
        is_same = value is self.value or isinstance(value, _PLAIN)
        return is_same and not unlike(value, self.contents, 0.0)

    def put(self) -> None:
        """Give the module this value, with its contents, in other memory than what graphs may have saved."""
        self.owner[self.key] = self.value
        if isinstance(self.value, Tensor):
            if not self.value.requires_grad or self.value.is_leaf:
                self.value.data = self.contents.clone()
        elif type(self.value) in _CONTAINERS and type(self.value) is not tuple:
            items = copy(self.contents)
            self.value.clear()
            (self.value.update if isinstance(self.value, (dict, set)) else self.value.extend)(items)


class ModuleState:
    """What a module keeps, as it was when this was made, but for metrics and BatchNorm."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept = {
            name: Written(owner, key, value, _copied(value), is_saved)
            for name, owner, key, value, is_saved in _values(module)
        }
        tensors = (kept.value for kept in self._kept.values() if isinstance(kept.value, Tensor))
        self._memory = [(tensor, tensor.data) for tensor in tensors]

    def changes(self) -> dict[str, Written]:
        """What has been written since, with copies."""
        return {
            name: Written(owner, key, value, _copied(value), is_saved)
            for name, owner, key, value, is_saved in _values(self._module)
            if name not in self._kept or not self._kept[name].is_still(value)
        }

    def reset(self, written: Mapping[str, Written]) -> None:
        """Undo what was written."""
        for name, other in written.items():
            if name in self._kept:
                self._kept[name].put()
            else:
                other.owner.pop(other.key, None)

    def close(self) -> None:
        """Undo everything, in the memory in which it was."""
        self.reset(self.changes())
        for tensor, data in self._memory:
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data.copy_(tensor.data)


def _values(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Any, bool]]:
    for prefix, part in own_parts(module):
        for key, parameter in part.named_parameters(recurse=False):
            if is_plain(parameter):  # shards are compared by all ranks together, and one rank is here
                yield prefix + key, part._parameters, key, parameter, True  # pyright: ignore[reportReturnType]  # parameters only
        for key, buffer in part.named_buffers(recurse=False):
            if is_plain(buffer) and buffer.layout is torch.strided and not buffer.is_quantized:
                yield prefix + key, part._buffers, key, buffer, key not in part._non_persistent_buffers_set
        own = vars(part)
        for key, value in list(own.items()):
            if key not in _OWN and _is_plain(value):
                yield prefix + key, own, key, value, False


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return is_plain(value) and not isinstance(value, nn.Parameter)
    if type(value) in _CONTAINERS:
        return len(value) <= _MOST_ELEMENTS and all(map(_is_plain, _elements(value)))
    return isinstance(value, _PLAIN)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy(value)


def _elements(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def unlike(one: Any, other: Any, by: float = 1e-6) -> bool:
    """Whether two values, or what they hold, differ by more than a fraction of the largest."""
    if one is other:
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or not by:
            return not torch.equal(one, other)
        a, b = one.detach().double(), other.detach().double().to(one.device)
        return not torch.allclose(a, b, rtol=0, atol=by * float(b.abs().max() if b.numel() else 0), equal_nan=True)
    if type(one) is not type(other):
        return True
    if type(one) in _CONTAINERS and not isinstance(one, set):
        pairs = zip(_elements(one), _elements(other), strict=False)
        return len(one) != len(other) or any(unlike(a, b, by) for a, b in pairs)
    if isinstance(one, (float, np.floating)):
        return not (abs(one - other) <= by * abs(other) or (one != one and other != other))
    return bool(one != other)
