"""Calls of metrics on replicas: recorded in a step, and made again on the root with the inputs of the whole batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning_fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.aggregation import BaseAggregator

from ..core.errors import ConfigError
from ..core.module_checks import is_metric, why_whole
from ..core.no_value import PartValues
from ..core.rng import random_state, swapped_random_state
from .losses import is_loss
from .results import are_equal, is_fraction


@dataclass(frozen=True)
class Call:
    """One call of a metric's copy on a replica: `update` or `forward`, with its inputs."""

    metric: int
    method: str
    inputs: tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class MetricCalls:
    """Stands between a replica's step and its metrics.

    Attributes:
        recorded: the numbers of the metrics whose calls are noted, as they are made again on the root, or may be.
        whole: of those, the ones whose `update` is called on the root only.
        calls: what the step called of them, in order.
        is_open: whether a step runs: `compute` and `reset` would be those of a chunk, and are refused.
    """

    strategy: str
    recorded: set[int]
    whole: set[int]
    calls: list[Call] = field(default_factory=list)
    is_open: bool = False
    values: PartValues = field(default_factory=PartValues)
    _depth: int = 0

    def watch(self, copy: nn.Module, number: int | None) -> None:
        """Put this between a metric's copy and those who call it.

        Args:
            copy: a metric, or a part of one.
            number: of the root's metric, for `calls`; None for a part of a metric.
        """
        for method in ("update", "forward"):
            own = getattr(copy, method)
            if method == "forward" and isinstance(copy, Metric):
                own = partial(self.values.forward, copy, own)
            call = partial(self.called, method, own, number)
            vars(copy)[method] = call if number is not None else partial(self.verified, method, copy, call)
        for method in ("compute", "reset"):
            vars(copy)[method] = partial(self.verified, method, copy, getattr(copy, method))

    def called(self, method: str, call: Callable[..., Any], number: int | None, *args: Any, **kwargs: Any) -> Any:
        """Make a call of a metric, and note it where that is asked for."""
        outermost = self._depth == 0
        self._depth += 1
        try:
            if number is None or number not in self.recorded or not outermost:
                return call(*args, **kwargs)
            self.calls.append(Call(number, method, apply_to_collection((args, kwargs), Tensor, Tensor.detach)))
            if method == "update" and number in self.whole:
                return None  # the root's is called with the inputs of all replicas
            with swapped_random_state(random_state()):
                return call(*args, **kwargs)
        finally:
            self._depth -= 1

    def verified(self, method: str, copy: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call that is not known for a chunk.

        Raises:
            ConfigError: a step made it.
        """
        if self.is_open and self._depth == 0:
            raise ConfigError(
                f"{self.strategy}: {type(copy).__name__}.{method}() was called in a step, where each replica has "
                "counted its own chunk only. Log the metric itself (self.log('name', metric)), or call it in an epoch "
                "hook or in training_step_end."
            )
        return call(*args, **kwargs)


def call_again(
    metrics: Sequence[Metric],
    replicas: Sequence[MetricCalls],
    sizes: Sequence[int],
    strategy: str,
    losses: Sequence[Tensor],
) -> None:
    """Call the root's metrics as one device would have: once for what every replica called, with joined inputs.

    Args:
        replicas: the calls of those that had samples.
        sizes: samples of each.
        strategy: name that begins error messages.
        losses: which the step has returned on each; none if it has not.

    Raises:
        ConfigError: replicas made different calls, or inputs can't be joined; the message names the metric.
    """
    made = [[(call.metric, call.method) for call in replica.calls] for replica in replicas]
    for calls in made:
        if calls != made[0]:
            number = next(iter({number for number, _ in set(calls) ^ set(made[0])}), made[0][0][0] if made[0] else 0)
            raise ConfigError(
                f"{strategy}: {type(metrics[number]).__name__} was not called alike on all replicas, so its value for "
                "the whole batch isn't known. Call it once per step whatever the samples are, or in training_step_end."
            )
    for column in zip(*(replica.calls for replica in replicas), strict=True):
        metric = metrics[column[0].metric]
        args, kwargs = _joined(metric, [call.inputs for call in column], list(sizes), strategy, losses)
        getattr(metric, column[0].method)(*args, **kwargs)


def takes_whole_batches(metric: nn.Module) -> bool:
    """Whether a metric must be called once per batch, with all of its samples.

    So must metrics that are made of other metrics (a running window counts calls), metrics of single numbers (each
    call counts alike), and those that read something from all samples of a call.
    """
    holds_metrics = any(isinstance(part, (Metric, MetricCollection)) for part in metric.modules() if part is not metric)
    return holds_metrics or isinstance(metric, BaseAggregator) or why_whole(metric) is not None


def outermost_metrics(value: nn.Module) -> list[Metric]:
    """The metrics that are called by themselves: a metric, the members of a collection."""
    if is_metric(value):
        return [value]
    return [metric for child in value._modules.values() if child is not None for metric in outermost_metrics(child)]


def _joined(metric: Metric, inputs: list[Any], sizes: list[int], strategy: str, losses: Sequence[Tensor]) -> Any:
    """The inputs of the whole batch; rows that are not samples (tokens, valid pixels) are concatenated in order."""
    if len(inputs) == 1:
        return move_data_to_device(inputs[0], metric.device)
    if (weighted := _weighted_mean(metric, inputs, sizes)) is not None:
        return weighted, {}
    name = f"{strategy}: {type(metric).__name__}"
    aggregators = [part for part in metric.modules() if isinstance(part, BaseAggregator)]
    is_unknown = any(isinstance(part, SumMetric) for part in aggregators)
    if not is_unknown and any(not isinstance(part, MeanMetric) for part in aggregators):
        given = [(*args, *kwargs.values())[0] for args, kwargs in inputs]
        is_unknown = is_fraction(given[0]) and not (_are_losses(given, losses) or are_equal(given))
    columns = zip(*(args for args, _ in inputs), strict=True)
    args = tuple(_joined_value(list(column), sizes, metric.device, name, is_unknown) for column in columns)
    return args, _joined_value([kwargs for _, kwargs in inputs], sizes, metric.device, name, is_unknown)


def _are_losses(numbers: Sequence[Any], losses: Sequence[Tensor]) -> bool:
    """Whether numbers are those that the step has returned as its losses, by which parts are weighted."""
    return len(losses) == len(numbers) and all(
        is_loss(number, loss) or float(number) == float(loss) for number, loss in zip(numbers, losses, strict=True)
    )


def _weighted_mean(metric: Metric, inputs: list[Any], sizes: list[int]) -> tuple[Any, Any] | None:
    """The mean of numbers that were given with weights counted in each part, and its weight; None of other inputs."""
    if not isinstance(getattr(metric, "base_metric", metric), MeanMetric):
        return None
    given = [dict(zip(("value", "weight"), args, strict=False)) | kwargs for args, kwargs in inputs]
    parts = [move_data_to_device(part, metric.device) for part in given]
    numbers = [number for part in parts for number in (part["value"], part.get("weight"))]
    if any(number is None or (isinstance(number, Tensor) and number.dim()) for number in numbers):
        return None
    values, weights = numbers[::2], numbers[1::2]
    if not isinstance(weights[0], Tensor) and weights != sizes and are_equal(weights):
        return None  # a constant for the whole batch
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / (total or 1), total


def _joined_value(parts: list[Any], sizes: list[int], device: torch.device, name: str, is_unknown: bool) -> Any:
    first = parts[0]
    if isinstance(first, Tensor) and first.dim():
        moved = [part.to(device) for part in parts]
        if len(first) != sizes[0] and all(part.shape == first.shape and torch.equal(part, moved[0]) for part in moved):
            return moved[0]  # the same for all samples
        return torch.cat(moved)
    if isinstance(first, list):
        return [element for part in parts for element in move_data_to_device(part, device)]
    if type(first) is dict and all(part.keys() == first.keys() for part in parts):
        columns = {key: [part[key] for part in parts] for key in first}
        return {key: _joined_value(column, sizes, device, name, is_unknown) for key, column in columns.items()}
    if isinstance(first, float) or (isinstance(first, Tensor) and first.is_floating_point()):
        if not is_unknown:
            return sum(move_data_to_device(part, device) * size for part, size in zip(parts, sizes, strict=True)) / sum(
                sizes
            )
    elif not isinstance(first, Tensor):
        if parts == sizes:
            return sum(sizes)
        if are_equal(parts):
            return first
    raise ConfigError(
        f"{name} was given {'one number' if isinstance(first, (int, float, Tensor)) else type(first).__name__} per "
        "replica, from which the whole batch's isn't known: it may be a mean over samples, a sum or another. Give it a "
        "tensor with one value per sample, or update it in training_step_end or in an epoch hook; a number that the "
        "step also returns as its loss is a mean."
    )
