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
from torch.utils._pytree import tree_flatten

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
        is_saved: whether checkpoints hold it.
        contents: a copy, see `copied`.
    """

    owner: dict[str, Any]
    key: str
    value: Any
    is_saved: bool
    contents: Any = None

    def copied(self) -> "Written":
        """It, with a copy of its contents."""
        self.contents = self.value.detach().clone() if isinstance(self.value, Tensor) else copy(self.value)
        return self

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
        self._module, self._kept = module, {name: one.copied() for name, one in _values(module)}
        tensors = (kept.value for kept in self._kept.values() if isinstance(kept.value, Tensor))
        self._memory = [(tensor, tensor.data) for tensor in tensors]

    def taken(self) -> Mapping[str, Written]:
        """Undo what has been written since, and return it."""
        written = {name: one.copied() for name, one in _values(self._module) if self._differs(name, one.value)}
        for name, other in written.items():
            if name in self._kept:
                self._kept[name].put()
            else:
                other.owner.pop(other.key, None)
        return written

    def _differs(self, name: str, value: Any) -> bool:
        known = self._kept.get(name)
        if known is None or not (value is known.value or isinstance(value, _PLAIN)):
            return True
        return unlike(value, known.contents, 0.0)

    def close(self) -> None:
        """Undo everything, in the memory in which it was."""
        self.taken()
        for tensor, data in self._memory:
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data.copy_(tensor.data)


def _values(module: nn.Module) -> Iterator[tuple[str, Written]]:
    for prefix, part in own_parts(module):
        for key, parameter in part.named_parameters(recurse=False):
            if is_plain(parameter):  # shards are compared by all ranks together, and one rank is here
                yield prefix + key, Written(part._parameters, key, parameter, True)  # pyright: ignore[reportArgumentType]  # parameters only
        for key, buffer in part.named_buffers(recurse=False):
            if is_plain(buffer) and buffer.layout is torch.strided and not buffer.is_quantized:
                yield prefix + key, Written(part._buffers, key, buffer, key not in part._non_persistent_buffers_set)
        own = vars(part)
        for key, value in list(own.items()):
            if key not in _OWN and _is_plain(value):
                yield prefix + key, Written(own, key, value, False)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return is_plain(value) and not isinstance(value, nn.Parameter)
    if type(value) in _CONTAINERS:
        return len(value) <= _MOST_ELEMENTS and all(
            map(_is_plain, value.values() if isinstance(value, dict) else value)
        )
    return isinstance(value, _PLAIN)


def unlike(one: Any, other: Any, by: float = 1e-6) -> bool:
    """Whether two values, or what they hold, differ by more than a fraction of the largest."""
    if one is other:
        return False
    (held, kind), (others, other_kind) = tree_flatten(one), tree_flatten(other)
    return kind != other_kind or any(a is not b and _apart(a, b, by) for a, b in zip(held, others, strict=True))


def _apart(one: Any, other: Any, by: float) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or not by:
            return not torch.equal(one, other)
        a, b = one.detach().double(), other.detach().double().to(one.device)
        return not torch.allclose(a, b, rtol=0, atol=by * float(b.abs().max() if b.numel() else 0), equal_nan=True)
    if type(one) is not type(other):
        return True
    if isinstance(one, (float, np.floating)):
        return not (abs(one - other) <= by * abs(other) or (one != one and other != other))
    return bool(one != other)
