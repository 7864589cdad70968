"""Run a step of a module that leaves no trace in it."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from .module_checks import is_metric, metrics_of
from .module_log import lightning_modules, log_nothing, module_log, received
from .patching import take_hooks

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set, tuple)
_MOST_ELEMENTS = 4096
"""Of a container in which others are looked for."""


@contextmanager
def untraced_step(module: pl.LightningModule, silent: bool = False) -> Generator[list[tuple[Metric, dict[str, Any]]]]:
    """Run a step that leaves no trace.

    Buffers and metric states are restored, logged values get no weight, and what the step appended to lists of the
    module (`self.training_step_outputs.append(...)`) is removed.

    Args:
        silent: whether it logs nothing at all: in an evaluation ranks may log different names.

    Yields:
        The metrics in the module, each with the attributes that will be restored.
    """
    buffers = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    metrics = [(metric, metric_state(metric)) for metric in metrics_of(module)]
    lists = [(value, len(value)) for value in vars(module).values() if type(value) is list]
    try:
        logs = map(module_log, lightning_modules(module))
        with received((log, log_nothing if silent else log.without_weight) for log in logs):
            yield metrics
    finally:
        for part, name, buffer, value in buffers:
            setattr(part, name, buffer)  # the step may have put another in its place
            buffer.data.copy_(value)  # hidden from autograd: BatchNorm's backward, with weight 0 here, needs them
        for value, length in lists:
            del value[length:]
        for metric, state in metrics:
            for name in [name for name, value in vars(metric).items() if type(value) is set and name not in state]:
                del vars(metric)[name]  # notes about what it was given
            vars(metric).update(state)


@contextmanager
def trial_step(module: pl.LightningModule, evaluates: bool = True) -> Generator[None]:
    """Run a step, in evaluation mode or not, only to see its result: it leaves no trace, also in attributes."""
    first_hook = RemovableHandle.next_id
    parts = [(part, part.training, dict(vars(part)), list(_contents(vars(part)))) for part in module.modules()]
    try:
        with untraced_step(module, silent=True):
            for part, *_ in parts:
                part.training = part.training and not evaluates
            yield
    finally:
        for part, training, attributes, contents in parts:
            if not is_metric(part):  # restored already
                vars(part).clear()
                vars(part).update(attributes)
                for container, items in contents:
                    container.clear()
                    (container.update if isinstance(container, (dict, set)) else container.extend)(items)
            part.training = training
        for parameter in module.parameters() if RemovableHandle.next_id > first_hook else ():
            take_hooks(parameter, first_hook)


def _contents(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the dicts, lists, deques and sets in a value, each with a copy."""
    left, seen = [value], set[int]()
    while left:
        holder = left.pop()
        children = holder.values() if isinstance(holder, dict) else holder
        for child in children if len(children) <= _MOST_ELEMENTS else ():
            if type(child) in _CONTAINERS and id(child) not in seen:  # hooks of a torch module, too
                seen.add(id(child))
                left.append(child)
                if type(child) is not tuple:
                    yield child, copy(child)


def metric_state(metric: Metric) -> dict[str, Any]:
    """A copy of what a metric has counted, by the names of its attributes."""
    kinds = (int, float, Tensor, set)  # of wrappers, and what it was given
    others = [name for name, value in vars(metric).items() if isinstance(value, kinds)]
    values = {name: getattr(metric, name) for name in (*metric._defaults, *others, "_computed", "_forward_cache")}
    return {name: list(value) if isinstance(value, list) else _kept(value) for name, value in values.items()}


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy(value)
