"""Run a step with a copy of what its module keeps, see what it changes there, and compare values."""

import copy
import itertools
import pickle
import random
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.hooks import RemovableHandle
from torchmetrics import MetricCollection
from typing_extensions import Self

from ...core.module_checks import is_metric, is_plain
from ...core.patching import CONTAINERS, LIGHTNING_KEYS, hooks_of
from ..results import is_loss
from ..structure import walk

_LIBRARIES = ("builtins", "evener", "functools", "lightning", "lightning_fabric", "pytorch_lightning", "torch", "types")
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray, Tensor, *CONTAINERS, *GENERATORS)
_LARGE = 2**20
"""Elements of a buffer that is not copied for each part."""


class Written(NamedTuple):
    """A parameter, a buffer or an attribute that a step has left, and its owner: a module, or an object in one."""

    owner: Any
    key: str
    value: Any

    @property
    def is_saved(self) -> bool:
        """Whether checkpoints hold it."""
        one = self.owner
        is_buffer = isinstance(one, nn.Module) and self.key in one._buffers.keys() - one._non_persistent_buffers_set
        return is_buffer or (isinstance(one, nn.Module) and self.key in one._parameters)


class ModuleState:
    """A copy of what a module keeps, but for metrics, that is in its place inside the block.

    Parameters and large buffers are not copied; what the block writes to them is undone after it. `base` is the state
    in which this one is made.
    """

    def __init__(self, module: nn.Module, base: "ModuleState | None" = None) -> None:
        self._module, self._owners, self._first_hook = module, list(_owners(module)), RemovableHandle.next_id
        self._held = list(_held(module)) if base is None else base._held
        self._changed = list[tuple[Tensor, Tensor]]()
        copied = partial(_copied, {id(tensor) for tensor, _ in self._held})
        self._own = [{key: tree_map(copied, value) for key, value in vars(one).items()} for _, one in self._owners]

    def __enter__(self) -> Self:
        self._exchange()
        for tensor, contents in self._changed:
            tensor.data.copy_(contents)
        return self

    def __exit__(self, *_: object) -> None:
        plain = [(one, kept) for one, kept in self._held if is_plain(one)]  # shards are compared by all ranks together
        self._changed = [(one, one.detach().clone()) for one, kept in plain if not torch.equal(one, kept)]
        for tensor, kept in self._held:
            tensor.data.copy_(kept)  # hidden from autograd, whose graphs are not to be spoiled
        self._exchange()
        for hooks in [hooks for parameter in self._module.parameters() for hooks in hooks_of(parameter)]:
            for number in [number for number in hooks if isinstance(number, int) and number >= self._first_hook]:
                del hooks[number]

    def _exchange(self) -> None:
        for i, space in enumerate(vars(owner) for _, owner in self._owners):
            own, self._own[i] = self._own[i], dict(space)
            for key in space.keys() - own.keys():  # other threads may read what stays
                del space[key]
            space.update(own)

    @staticmethod
    def give(written: Iterable[Written]) -> None:
        """Give the module what a step has left, in the block."""
        for owner, key, value in written:
            if isinstance(known := vars(owner).get("_parameters", {}).get(key), Tensor):
                known.data.copy_(value)
            else:
                setattr(owner, key, tree_map(partial(_copied, ()), value))

    def written(self) -> dict[str, Written]:
        """What the block has changed, by name, asked after it."""
        found, changed = dict[str, Written](), {id(tensor): own for tensor, own in self._changed}
        for (prefix, owner), own in zip(self._owners, self._own, strict=True):
            before = _named(vars(owner))
            for key, value in () if isinstance(owner, MetricCollection) else _named(own).items():
                now = changed.get(id(value), value)
                if now is not value or key not in before or unlike(value, before[key], 0.0):
                    found[f"{prefix}{key}"] = Written(owner, key, now)
        return found


def _owners(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module, those in it but for metrics, and objects of users' classes, such as statistics; with prefixes."""
    for name, part in module.named_modules():
        if not is_metric(part):
            prefix = f"{name}." if name else ""
            yield prefix, part
            for key, value in vars(part).items():
                of_user = type(value).__module__.partition(".")[0] not in _LIBRARIES
                is_object = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type))
                if key not in LIGHTNING_KEYS and is_object and (of_user or isinstance(value, SimpleNamespace)):
                    yield f"{prefix}{key}.", value


def _held(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters, and buffers that are not copied, each with a copy of what it holds."""
    for part in module.modules():
        is_script = isinstance(part, torch.jit.ScriptModule)
        buffers = (b for b in part.buffers(recurse=False) if is_script or b.numel() > _LARGE or not is_plain(b))
        for tensor in (*part.parameters(recurse=False), *buffers):
            if not (is_lazy(tensor) or tensor.is_meta):
                yield tensor, tensor.detach().clone()


def _named(space: dict[str, Any]) -> dict[str, Any]:
    """The attributes among these that are compared, and parameters and buffers."""
    own = {key: value for key, value in space.items() if key not in LIGHTNING_KEYS and isinstance(value, _PLAIN)}
    return {**own, **space.get("_parameters", {}), **space.get("_buffers", {})}


def _copied(held: Container[int], value: Any) -> Any:
    """A copy of a tensor, an array, a set or a generator, but for those of some numbers; else the value itself."""
    if isinstance(value, Tensor):
        is_own = is_plain(value) and value.is_leaf and not isinstance(value, nn.Parameter) and id(value) not in held
        return value.detach().clone().requires_grad_(value.requires_grad) if is_own else value
    if isinstance(value, GENERATORS):
        return copy.deepcopy(value)
    return copy.copy(value) if isinstance(value, np.ndarray) or type(value) in CONTAINERS else value


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


def tolerance(*values: Any) -> float:
    """How large a difference may be, by the least precise dtype among values."""
    numbers = [one for one in values if isinstance(one, Tensor) and one.is_floating_point()]
    eps = max((torch.finfo(one.dtype).eps for one in numbers), default=torch.finfo(torch.float32).eps)
    return _EXACT if eps < 1e-12 else max(_CLOSE, 16 * eps)


def are_alike(one: Any, other: Any, losses: Iterable[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Whether two values hold the same tensors, numbers and strings, but for what is one of some losses."""
    kinds = (Tensor, np.ndarray, int, float, str)
    ours, theirs = ([leaf for _, leaf in walk(value) if isinstance(leaf, kinds)] for value in (one, other))
    for a, b in zip(ours, theirs, strict=False):
        is_float = isinstance(a, float) or (isinstance(a, Tensor) and a.is_floating_point())
        is_float = is_float or (isinstance(a, np.ndarray) and a.dtype.kind in "fc")
        is_known = isinstance(b, Tensor) and any(is_loss(a, loss) for loss in losses)
        if not is_known and unlike(a, b, tolerance(a, *parameters) if is_float else 1e-6):
            return False
    return len(ours) == len(theirs)


def unlike(one: Any, other: Any, by: float = 1e-6) -> bool:
    """Whether two values, or what they hold, differ by more than a fraction of the largest; objects never do."""
    if one is other:
        return False
    (held, kind), (others, other_kind) = tree_flatten(one), tree_flatten(other)
    return kind != other_kind or any(a is not b and _apart(a, b, by) for a, b in zip(held, others, strict=True))


def _apart(one: Any, other: Any, by: float) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.dtype.kind in "biufc":
        one, other = torch.as_tensor(one), torch.as_tensor(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if not (is_plain(one) and is_plain(other)):
            return False
        if one.shape != other.shape or not by:
            return not torch.equal(one, other)
        a, b = one.detach().double(), other.detach().double().to(one.device)
        by = min(by, 1e-8) if one.dtype == other.dtype == torch.float64 else by
        return not torch.allclose(a, b, rtol=0, atol=by * float(b.abs().max() if b.numel() else 0), equal_nan=True)
    if type(one) is not type(other):
        return True
    if isinstance(one, GENERATORS):
        return _state(one) != _state(other)
    if isinstance(one, (float, np.floating)):
        return not (abs(one - other) <= by * abs(other) or (one != one and other != other))
    return isinstance(one, _PLAIN) and not isinstance(one, np.ndarray) and bool(one != other)


def _state(generator: Any) -> bytes:
    is_torch = isinstance(generator, torch.Generator)
    return generator.get_state().numpy().tobytes() if is_torch else pickle.dumps(generator)
