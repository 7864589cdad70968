"""Replace methods for a run, attributes, hooks or lines of a log inside a block; undo what a step does to a module."""

import logging
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn
from torchmetrics import Metric

from .module_checks import metrics_of

HOOKS = tuple(key for key, value in nn.Module().__dict__.items() if "hooks" in key and isinstance(value, dict))
"""The attributes in which a module keeps its hooks, each a dictionary from number to hook."""
LIGHTNING_KEYS = frozenset(vars(pl.LightningModule()))
"""Attributes that every module has."""
CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set, tuple)
MOST_ELEMENTS = 4096
"""Of a container in which others are looked for."""


class Replacement:
    """Takes the place of a method of one object, until `remove`: calls `call` with the method and its arguments."""

    def __init__(self, owner: object, name: str, call: Callable[..., Any]) -> None:
        self.owner, self.name, self.call = owner, name, call
        self._kept = vars(owner).get(name)
        self.own: Callable[..., Any] = getattr(owner, name) if self._kept is None else self._kept
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what stands for the method."""
        return self.call(self.own, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied or pickled with its object, it becomes the copy's own method."""
        return getattr, (self.owner, self.name)

    def remove(self) -> None:
        """Restore the object's own method, unless another has taken this one's place."""
        if vars(self.owner).get(self.name) is self:
            del vars(self.owner)[self.name]
            vars(self.owner).update({} if self._kept is None else {self.name: self._kept})


@contextmanager
def replaced(owner: object, name: str, value: Any) -> Generator[None]:
    """Set an attribute on an object, or a class, inside the block, and restore the previous one afterwards."""
    kept = [vars(owner)[name]] if name in vars(owner) else []
    put: Callable[[str, Any], None] = partial(setattr, owner) if isinstance(owner, type) else vars(owner).__setitem__
    put(name, value)
    try:
        yield
    finally:
        if kept:
            put(name, kept[0])
        elif isinstance(owner, type):
            delattr(owner, name)
        else:
            del vars(owner)[name]


def hooks_of(owner: nn.Module | Tensor) -> list[dict[Any, Any]]:
    """The dictionaries of the hooks of a module, or of a parameter: of its gradient, and of what is accumulated."""
    if isinstance(owner, nn.Module):
        return [vars(owner)[key] for key in HOOKS if key in vars(owner)]  # a scripted one has others
    found = [owner._backward_hooks, owner._post_accumulate_grad_hooks]
    return [{} if hooks is None else hooks for hooks in found]


@contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Generator[None]:
    """Disable the parameters' hooks inside the block: those that get a gradient, and those that follow it."""
    found = [(hooks, dict(hooks)) for parameter in parameters for hooks in hooks_of(parameter) if hooks]
    for hooks, _ in found:
        hooks.clear()  # torch keeps these dicts: to set None instead has no effect
    try:
        yield
    finally:
        for hooks, before in found:
            hooks.update(before)


@contextmanager
def filtered(loggers: Iterable[str], keeps: Callable[[logging.LogRecord], bool]) -> Generator[None]:
    """Log only the records that a function keeps, inside the block."""
    found = [logging.getLogger(name) for name in loggers]
    for logger in found:
        logger.addFilter(keeps)
    try:
        yield
    finally:
        for logger in found:
            logger.removeFilter(keeps)


LIGHTNING_TELLS = ("pytorch_lightning.utilities.rank_zero", "lightning.pytorch.utilities.rank_zero")
"""The loggers of `rank_zero_info` and `rank_zero_warn`, under both names of Lightning."""


class Kept:
    """What dictionaries and the containers, of at most `most` elements, in them hold; `contents` are copied tensors."""

    def __init__(
        self, spaces: Iterable[dict[str, Any]], contents: Iterable[tuple[Tensor, Tensor]] = (), most: float = math.inf
    ) -> None:
        self._spaces = [(space, dict(space)) for space in spaces]
        found = _contained(space for space, _ in self._spaces)
        self._containers = [(one, copy(one)) for one in found if len(one) <= most]
        self._contents = list(contents)

    def restore(self) -> None:
        """Restore it; writes to tensors are hidden from autograd: BatchNorm's backward, with weight 0, needs them."""
        for space, before in self._spaces:  # which other threads may read
            for key in space.keys() - before.keys():
                del space[key]
            space.update(before)
        for container, items in self._containers:
            refill(container, items)
        for tensor, contents in self._contents:
            tensor.data.copy_(contents)


def refill(container: Any, items: Any) -> None:
    """Have a dict, list, deque or set hold the items of another one."""
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(items)


def _contained(holders: Iterable[Any]) -> Iterator[Any]:
    """Yield the dicts, lists, deques and sets in the values of others, also in tuples; a module's hooks, too."""
    left, seen = [*holders], set[int]()
    while left:
        holder = left.pop()
        for child in list(holder.values() if isinstance(holder, dict) else holder):
            if type(child) in CONTAINERS and id(child) not in seen:
                seen.add(id(child))
                left += [child] if len(child) <= MOST_ELEMENTS else []
                if type(child) is not tuple:
                    yield child


@contextmanager
def kept_metrics(module: nn.Module) -> Generator[list[tuple[Metric, dict[str, Any]]]]:
    """Restore what metrics in a module have counted after the block, which gets it."""
    metrics = [(metric, metric_state(metric)) for metric in metrics_of(module)]
    try:
        yield metrics
    finally:
        for metric, state in metrics:
            for name in [name for name, value in vars(metric).items() if type(value) is set and name not in state]:
                del vars(metric)[name]  # notes about what it was given
            vars(metric).update(state)


def metric_state(metric: Metric) -> dict[str, Any]:
    """A copy of what a metric has counted, by the names of its attributes."""
    # also those of wrappers, and what it was given
    others = [name for name, value in vars(metric).items() if isinstance(value, (int, float, Tensor, set))]
    return {name: copied(getattr(metric, name)) for name in (*metric._defaults, *others, "_computed", "_forward_cache")}


def copied(value: Any) -> Any:
    """A value with contents of its own, without a graph."""
    return value.detach().clone() if isinstance(value, Tensor) else copy(value)
