"""See what a step leaves in a module: parameters, buffers, plain attributes and random generators, by name."""

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ...core.module_checks import is_metric, is_plain, own_parts
from ...core.module_state import CONTAINERS, LIGHTNING_KEYS, MOST_ELEMENTS, Kept, copied, refill
from ...core.patching import hooks_of
from .differences import unlike

_LIBRARIES = ("builtins", "evener", "functools", "lightning", "lightning_fabric", "pytorch_lightning", "torch", "types")
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


@dataclass
class Written:
    """A value that a module keeps in a dictionary, of parameters, buffers or attributes, and a copy of its contents.

    Args:
        is_saved: whether checkpoints hold it.
    """

    owner: dict[str, Any]
    key: str
    value: Any
    is_saved: bool = False
    contents: Any = None

    def put(self) -> None:
        """Give the module this value, with its contents."""
        self.owner[self.key] = self.value
        _give(self.value, self.contents)


class ModuleState(Kept):
    """What a module keeps, as it was when this was made, but for metrics; BatchNorm and hooks are only restored."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._first_hook = module, RemovableHandle.next_id
        self._kept = {name: replace(one, contents=_contents(one.value)) for name, one in _values(module)}
        held = [(one.value, one.contents) for one in self._kept.values() if isinstance(one.value, Tensor)]
        self._memory = [(tensor, tensor.data) for tensor, _ in held]
        held += [(buffer, copied(buffer)) for buffer in module.buffers()]
        parts = [part for part in module.modules() if not is_metric(part)]
        super().__init__([space for part in parts for space in (vars(part), *_objects(part).values())], held)
        inside = [
            one for items, _ in self._containers for one in (items.values() if isinstance(items, dict) else items)
        ]
        self._contents += [(one, copied(one)) for one in inside if isinstance(one, Tensor)]
        others = [one.value for one in self._kept.values() if not isinstance(one.value, (Tensor, *CONTAINERS))]
        self._others = [
            (one, _contents(one)) for one in (*others, *inside) if isinstance(one, (np.ndarray, *_GENERATORS))
        ]

    def taken(self, draws: bool = True) -> dict[str, Written]:
        """Undo what has been written since, and return it; `draws` has generators undo what they have drawn, too."""
        found = {name: one for name, one in _values(self._module) if self._differs(name, one.value)}
        kinds = () if draws else _GENERATORS
        written = {
            name: replace(one, contents=_contents(one.value))
            for name, one in found.items()
            if not isinstance(one.value, kinds)
        }
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
        return unlike(_contents(value) if isinstance(value, _GENERATORS) else value, known.contents, 0.0)

    @override
    def restore(self) -> None:
        for tensor, data in self._memory:  # as others may see it
            tensor.data = data
        super().restore()
        for value, contents in self._others:
            _give(value, contents)
        for hooks in [hooks for parameter in self._module.parameters() for hooks in hooks_of(parameter)]:
            for number in [number for number in hooks if isinstance(number, int) and number >= self._first_hook]:
                del hooks[number]


def _values(module: nn.Module) -> Iterator[tuple[str, Written]]:
    for prefix, part in own_parts(module):
        for key, parameter in part.named_parameters(recurse=False):
            if is_plain(parameter):  # shards are compared by all ranks together, and one rank is here
                yield prefix + key, Written(part._parameters, key, parameter, True)  # pyright: ignore[reportArgumentType]  # parameters only
        for key, buffer in part.named_buffers(recurse=False):
            if is_plain(buffer) and buffer.layout is torch.strided and not buffer.is_quantized:
                yield prefix + key, Written(part._buffers, key, buffer, key not in part._non_persistent_buffers_set)
        for place, own in {"": vars(part), **_objects(part)}.items():
            for key, value in list(own.items()):
                if (place or key not in LIGHTNING_KEYS) and (_is_plain(value) or isinstance(value, _GENERATORS)):
                    yield f"{prefix}{place}{key}", Written(own, key, value)


def _objects(part: nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of objects of users' classes that a module holds, such as running statistics."""
    return {
        f"{key}.": vars(value)
        for key, value in vars(part).items()
        if key not in LIGHTNING_KEYS and hasattr(value, "__dict__") and not isinstance(value, nn.Module)
        and (isinstance(value, SimpleNamespace) or type(value).__module__.partition(".")[0] not in _LIBRARIES)
    }  # fmt: skip


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return is_plain(value) and not isinstance(value, nn.Parameter)
    if type(value) in CONTAINERS:
        inside = value.values() if isinstance(value, dict) else value
        return len(value) <= MOST_ELEMENTS and all(map(_is_plain, inside))
    return isinstance(value, _PLAIN) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc")


def _contents(value: Any) -> Any:
    """A copy of what a value holds: elements, items with what these hold, or a generator's state."""
    if isinstance(value, (random.Random, torch.Generator)):
        return value.getstate() if isinstance(value, random.Random) else value.get_state()
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        return copy.deepcopy(value.bit_generator.state) if isinstance(value, np.random.Generator) else value.get_state()
    if type(value) is tuple:
        return tuple(map(_contents, value))
    made = copied(value) if isinstance(value, (Tensor, np.ndarray, *CONTAINERS)) else value
    if type(value) in CONTAINERS and not isinstance(value, set):
        for place, inside in value.items() if isinstance(value, dict) else enumerate(value):
            made[place] = _contents(inside)
    return made


def _give(value: Any, contents: Any) -> None:
    """Have a value hold what `_contents` has copied; a tensor in other memory than graphs may have saved."""
    if isinstance(value, Tensor):
        if not value.requires_grad or value.is_leaf:
            value.data = contents.clone()
    elif isinstance(value, np.ndarray):
        value[...] = contents
    elif isinstance(value, random.Random):
        value.setstate(contents)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = contents
    elif isinstance(value, (np.random.RandomState, torch.Generator)):
        value.set_state(contents)
    elif type(value) in CONTAINERS and type(value) is not tuple:
        refill(value, _contents(contents))
