"""Metrics that must see a whole batch, while each micro-batch calls them: called once, with the inputs of all.

Metrics of metrics (`Running` counts calls), of single numbers (`MeanMetric`) and with a `data_range` of None; others
are simply updated once per micro-batch. See `takes_whole_batches`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

from ..batch.metric_calls import MetricCalls, call_again, outermost_metrics, takes_whole_batches
from ..core.no_value import forward_of_part
from ..core.patching import replaced
from ._metric_values import without_hooks


class WholeBatchMetrics:
    """Records what micro-batches call of such metrics, and calls them when all have ended.

    Args:
        microbatch: returns the micro-batch that runs on the calling thread.
    """

    def __init__(self, module: nn.Module, num_microbatches: int, microbatch: Callable[[], int]) -> None:
        self._module = module
        self._microbatch = microbatch
        self._calls = [MetricCalls("model_parallel") for _ in range(num_microbatches)]
        self._copies: dict[int, tuple[Metric, list[Metric]]] = {}
        self._metrics: list[Metric] = []

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the calls of one step."""
        found = _outermost(self._module)
        self._metrics = [metric for metric in found if takes_whole_batches(metric)]
        for calls in self._calls:
            calls.calls.clear()
            calls.is_open = True
        copies = [self._copies_of(metric) for metric in self._metrics]
        with ExitStack() as stack:
            for number, metric in enumerate(self._metrics):
                update = partial(self._called, number, "update", [metric.update] * len(self._calls))
                stack.enter_context(replaced(metric, "update", update))
                forward = partial(self._called, number, "forward", [_forward(copy) for copy in copies[number]])
                stack.enter_context(replaced(metric, "forward", forward))
            for metric in found:
                if not takes_whole_batches(metric):
                    own = partial(self._called, None, "forward", [_forward(metric)] * len(self._calls))
                    stack.enter_context(replaced(metric, "forward", own))
                compute = partial(self._verified, "compute", metric, metric.compute)
                stack.enter_context(replaced(metric, "compute", compute))
            yield

    def call(self, sizes: Sequence[int]) -> None:
        """Call the metrics with the inputs of all micro-batches.

        Args:
            sizes: samples per micro-batch.

        Raises:
            ConfigError: inputs can't be joined; the message names the metric.
        """
        for calls in self._calls:
            calls.is_open = False
        with torch.no_grad():
            call_again(self._metrics, self._calls[: len(sizes)], sizes, "model_parallel")

    def holds(self, metric: nn.Module) -> bool:
        """Whether a metric is one of these."""
        return isinstance(metric, Metric) and takes_whole_batches(metric)

    def _copies_of(self, metric: Metric) -> list[Metric]:
        """One copy per micro-batch, which computes what `forward` returns."""
        if id(metric) not in self._copies:
            self._copies[id(metric)] = (metric, [without_hooks(metric) for _ in self._calls])
        copies = self._copies[id(metric)][1]
        for copy in copies:
            copy.to(metric.device)
            copy.reset()
        return copies

    def _called(
        self, number: int | None, method: str, calls: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any
    ) -> Any:
        i = self._microbatch()
        return self._calls[i].called(method, calls[i], number, *args, **kwargs)

    def _verified(self, method: str, metric: Metric, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._calls[self._microbatch()].verified(method, metric, call, *args, **kwargs)


def _forward(metric: Metric) -> Callable[..., Any]:
    return partial(forward_of_part, metric, metric.forward)


def _outermost(module: nn.Module) -> list[Metric]:
    """The metrics of a module that are called by themselves, each once."""
    found: dict[int, Metric] = {}
    for part in _plain_modules(module):
        for child in part._modules.values():
            if isinstance(child, (Metric, MetricCollection)):
                found.update({id(metric): metric for metric in outermost_metrics(child)})
    return list(found.values())


def _plain_modules(module: nn.Module) -> list[nn.Module]:
    inside = {
        id(part)
        for metric in module.modules()
        if isinstance(metric, (Metric, MetricCollection))
        for part in metric.modules()
    }
    return [part for part in module.modules() if id(part) not in inside]
