"""See what a step leaves in a module: parameters, buffers, plain attributes and random generators, by name."""

import copy
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ...core.module_checks import is_metric, is_plain, own_parts
from ...core.patching import CONTAINERS, LIGHTNING_KEYS, MOST_ELEMENTS, Kept, copied, hooks_of, refill
from ..results import is_loss
from ..structure import walk

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


_MOST_ELEMENTS = 2**16
"""Of the parameters whose gradients are compared."""
_EXACT, _CLOSE = 1e-8, 1e-3
"""Differences, relative to the largest number: of rounding in float64, and in narrower types."""


def small_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Some of the parameters that are trained, the smallest first."""
    trained = sorted((p for p in module.parameters() if p.requires_grad), key=nn.Parameter.numel)
    sums = itertools.accumulate(p.numel() for p in trained)
    return [p for i, (p, total) in enumerate(zip(trained, sums, strict=True)) if not i or total <= _MOST_ELEMENTS]


def gradients(losses: Sequence[Tensor], shares: Sequence[float], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The sum of the gradients of losses, each times its share."""
    total = [
        torch.zeros_like(p, dtype=torch.float64 if p.dtype is torch.float64 else torch.float32) for p in parameters
    ]
    for loss, share in zip(losses, shares, strict=True):
        if not loss.requires_grad:
            continue
        found: Sequence[Tensor | None] = ()
        with suppress(RuntimeError):  # reentrant checkpoints go backward no other way
            found = torch.autograd.grad(loss * share, parameters, allow_unused=True, retain_graph=True)
        # nor do hooks that compute gradients
        if all(one is None for one in found):  # pyright: ignore[reportUnnecessaryComparison]  # of what is unused
            for parameter in parameters:
                parameter.grad = None
            (loss * share).backward(retain_graph=True)
            found = [parameter.grad for parameter in parameters]
        for one, gradient in zip(total, found, strict=True):
            if gradient is not None:
                one += gradient.to_dense() if gradient.is_sparse else gradient
    return total


def differences(expected: Sequence[Tensor], found: Sequence[Tensor]) -> list[float]:
    """By how much each gradient differs, relative to the largest number in those expected; infinity if by nan."""
    largest = max((float(one.abs().max()) for one in expected if one.numel()), default=0.0) or 1.0
    pairs = zip(expected, found, strict=True)
    return [float((a - b).abs().nan_to_num(torch.inf).max()) / largest if a.numel() else 0.0 for a, b in pairs]


def tolerance(value: Any, parameters: Sequence[Tensor]) -> float:
    """How large a difference may be, by the least precise dtype among a value and parameters."""
    numbers = [one for one in (value, *parameters) if isinstance(one, Tensor) and one.is_floating_point()]
    eps = max((torch.finfo(one.dtype).eps for one in numbers), default=torch.finfo(torch.float32).eps)
    return _EXACT if eps < 1e-12 else max(_CLOSE, 16 * eps)


def are_alike(one: Any, other: Any, losses: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Whether two values hold the same tensors, numbers and strings, but for what is one of some losses."""
    kinds = (Tensor, np.ndarray, int, float, str)
    ours, theirs = ([leaf for _, leaf in walk(value) if isinstance(leaf, kinds)] for value in (one, other))
    for a, b in zip(ours, theirs, strict=False):
        if isinstance(b, Tensor) and any(is_loss(a, loss) for loss in losses):
            continue
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype.kind in "biufc":
            a, b = torch.as_tensor(a), torch.as_tensor(b)
        is_float = isinstance(a, float) or (isinstance(a, Tensor) and a.is_floating_point())
        if unlike(a, b, tolerance(a, parameters) if is_float else 1e-6):
            return False
    return len(ours) == len(theirs)


def unlike(one: Any, other: Any, by: float = 1e-6) -> bool:
    """Whether two values, or what they hold, differ by more than a fraction of the largest."""
    if one is other:
        return False
    (held, kind), (others, other_kind) = tree_flatten(one), tree_flatten(other)
    return kind != other_kind or any(a is not b and _apart(a, b, by) for a, b in zip(held, others, strict=True))


def _apart(one: Any, other: Any, by: float) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or not by:
            return not torch.equal(one, other)
        a, b = one.detach().double(), other.detach().double().to(one.device)
        by = min(by, 1e-8) if one.dtype == other.dtype == torch.float64 else by
        return not torch.allclose(a, b, rtol=0, atol=by * float(b.abs().max() if b.numel() else 0), equal_nan=True)
    if type(one) is not type(other):
        return True
    if isinstance(one, (float, np.floating)):
        return not (abs(one - other) <= by * abs(other) or (one != one and other != other))
    return bool(one != other)
