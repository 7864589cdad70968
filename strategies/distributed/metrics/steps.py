"""Values of metrics for one global batch, of which each rank has updated its metric with its own part."""

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from ...core.errors import ConfigError
from ...core.module_checks import metrics_of
from ...core.no_value import NoValue, PartValues, empty_copy
from ...core.patching import replaced
from .states import Sent, combine


class MetricSteps:
    """Records what `forward` of every metric is given in a step.

    Args:
        whole: whether a step calls a metric once, with all samples of this rank; not so with replicas or micro-batches.
    """

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self._inputs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._keeps: set[int] = set()
        self._copies: dict[int, tuple[Metric, Metric]] = {}
        self._open: set[int] = set()
        self._is_part = self._counts = False
        self._told: set[str] = set()
        self._values = PartValues()

    def methods(self, kinds: Iterable[type[Metric]]) -> Iterator[tuple[type[Metric], str, Any]]:
        """Yield what takes the place of `forward` of some classes: the class, the method's name and the method."""
        for kind in kinds:
            if "forward" in vars(kind) and not kind.__module__.startswith(("pytorch_lightning", "lightning")):
                yield kind, "forward", self._recording(kind.forward)

    def close(self) -> None:
        """Forget the last batch, and restore the metrics' own `compute`."""
        self._values.close()
        self.begin_batch(is_part=False, counts=False)

    def begin_batch(self, is_part: bool, counts: bool) -> None:
        """Forget the last batch.

        Args:
            is_part: whether this rank has only a part of the next one.
            counts: whether it has any samples of it.
        """
        self._inputs.clear()
        self._keeps.clear()
        self._is_part, self._counts = is_part, counts

    @contextmanager
    def unrecorded(self) -> Generator[None]:
        """Record nothing of the calls inside the block."""
        with replaced(self, "_inputs", {}), replaced(self, "_keeps", set()):
            yield

    def recorded(self, metric: Metric) -> bool:
        """Whether the step has called `forward` of a metric, and the metric keeps its value (Running does not)."""
        return id(metric) in self._keeps

    def verify_whole(self, name: str) -> None:
        """Refuse to compute the values of steps that call copies of a metric, each with a part of the samples.

        Args:
            name: name under which the metric is logged.
        """
        if not self.whole:
            raise ConfigError(
                f"self.log({name!r}, <a metric>, on_step=True, sync_dist=True): the value of a global batch can't be "
                "computed where a rank calls its metric once per device or micro-batch. Log it with on_step=False, or "
                "use one device per process and no micro-batches."
            )

    def states(self, metric: Metric) -> list[Sent]:
        """Compute the states of a metric and the metrics in it for this rank's part of the batch.

        Args:
            metric: a metric that the step has called, on all ranks.
        """
        copy = self._copy(metric)
        copy.reset()
        if self._counts:
            args, kwargs = self._inputs[id(metric)]
            with torch.no_grad():
                copy.update(*args, **kwargs)
        return [Sent.of(part).to(torch.device("cpu")) for part in metrics_of(copy)]

    def value(self, metric: Metric, ranks: Sequence[list[Sent]]) -> Any:
        """Compute the metric's value from the states of all ranks for a batch."""
        copy = self._copy(metric)
        parts = metrics_of(copy)
        for part, sent in zip(parts, zip(*ranks, strict=True), strict=True):
            combine(part, sent)
            part._update_count = max(rank.num_updates for rank in sent)
            part._computed = None
        copy.to(metric.device)
        with torch.no_grad():
            value = copy.compute()
        for part in parts:  # `reset` empties lists, and these are joined tensors here
            for name, default in part._defaults.items():
                if isinstance(default, list):
                    setattr(part, name, [])
        copy.reset()
        return value

    def _copy(self, metric: Metric) -> Metric:
        if id(metric) not in self._copies:
            self._copies[id(metric)] = (metric, empty_copy(metric))
        copy = self._copies[id(metric)][1].to(metric.device)
        for part in metrics_of(copy):
            part._to_sync = False
        return copy

    def _recording(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(metric: Metric, *args: Any, **kwargs: Any) -> Any:
            if id(metric) in self._open:  # a class that calls its parent's forward
                return forward(metric, *args, **kwargs)
            self._open.add(id(metric))
            try:
                self._inputs[id(metric)] = apply_to_collection((args, kwargs), Tensor, Tensor.detach)
                value = self._forward(metric, partial(forward, metric, *args, **kwargs))
                if isinstance(value, NoValue) or metric._forward_cache is not None:
                    self._keeps.add(id(metric))
                return value
            finally:
                self._open.discard(id(metric))

        return recorded

    def _forward(self, metric: Metric, forward: Callable[[], Any]) -> Any:
        if not self._is_part:
            return forward()
        value = self._values.forward(metric, forward)
        if isinstance(value, NoValue):
            metric._forward_cache = None
            if value.reason not in self._told:
                warnings.warn(value.reason, stacklevel=2)
                self._told.add(value.reason)
        return value
