"""Note what a module keeps, to undo what a step does to it."""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn
from torchmetrics import Metric

from .module_checks import metrics_of

LIGHTNING_KEYS = frozenset(vars(pl.LightningModule()))
"""Attributes that every module has."""
CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set, tuple)
MOST_ELEMENTS = 4096
"""Of a container in which others are looked for."""


class Kept:
    """What dictionaries, such as the attributes of a module, and the containers in them hold when this is made.

    Args:
        contents: tensors, each with a copy of what it holds.
        most: elements of the containers, at most.
    """

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
