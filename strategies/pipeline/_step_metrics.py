"""Metrics of a module that each micro-batch calls: their states and values are those of one call with the whole batch.

    a metric of metrics (`Running` counts calls), of single     called once, when all micro-batches have ended, with
    numbers, or with a `data_range` of None                     the inputs of all; see `takes_whole_batches`
    any other                                                   called by each micro-batch; the value of the step is
                                                                computed again, over the inputs of all

Methods are replaced once per run, where a step first finds a metric, and do in other places what they did before.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from ..batch.metric_calls import MetricCalls, call_again, opened, outermost_metrics, takes_whole_batches
from ..core.module_checks import metrics_of
from ..core.no_value import PartValues, empty_copy
from ..core.patching import Replacement
from ..core.private import put

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class StepMetrics:
    """Stands between the steps of micro-batches and the metrics of their module, until `close`.

    Args:
        microbatch: returns the micro-batch that runs on the calling thread.
    """

    def __init__(self, module: nn.Module, num_microbatches: int, microbatch: Callable[[], int]) -> None:
        self._module = module
        self._microbatch = microbatch
        self._values = PartValues()
        self._calls = [MetricCalls("model_parallel", values=self._values) for _ in range(num_microbatches)]
        self._whole: list[Metric] = []
        self._copies: dict[int, list[Metric]] = {}
        self._inputs: dict[int, dict[int, _Inputs]] = {}
        self._replaced: dict[int, list[Replacement]] = {}

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the calls of one step."""
        for metric in _outermost(self._module):
            if id(metric) not in self._replaced:
                self._watch(metric)
        for metric in self._whole:
            for copy in self._copies[id(metric)]:
                copy.to(metric.device)
                copy.reset()
        for calls in self._calls:
            calls.calls.clear()
        self._inputs = {}
        with opened(self._calls):
            yield

    def call(self, sizes: Sequence[int], losses: Sequence[Tensor]) -> None:
        """Call the metrics that take whole batches with the inputs of all micro-batches, whose losses are given."""
        with torch.no_grad():
            call_again(self._whole, self._calls[: len(sizes)], sizes, "model_parallel", losses)

    def settle(self, metric: Any) -> Any:
        """Make a metric show the value of the whole step; returns the same object."""
        inputs = self._inputs.get(id(metric), {})
        if len(inputs) > 1:
            put(metric, forward_cache=self._value(metric, [inputs[microbatch] for microbatch in sorted(inputs)]))
        return metric

    def clear(self) -> None:
        """Release the inputs of the last step."""
        self._inputs = {}

    def close(self) -> None:
        """Restore the metrics' own methods."""
        self._values.close()
        for replacement in (replacement for own in self._replaced.values() for replacement in reversed(own)):
            replacement.remove()
        self._replaced.clear()

    def _watch(self, metric: Metric) -> None:
        number = None
        if takes_whole_batches(metric):
            number = len(self._whole)
            self._whole.append(metric)
            self._copies[id(metric)] = [empty_copy(metric) for _ in self._calls]
        methods = {"forward": self._forward, "compute": self._compute}
        if number is not None:
            methods["update"] = self._update
        self._replaced[id(metric)] = [
            Replacement(metric, name, partial(self._called, call, metric, number)) for name, call in methods.items()
        ]

    def _called(
        self, call: Callable[..., Any], metric: Metric, number: int | None, own: Any, *args: Any, **kw: Any
    ) -> Any:
        """Make a call of a metric: a micro-batch's in a step, its own elsewhere."""
        return call(metric, number, own, *args, **kw) if self._calls[0].is_open else own(*args, **kw)

    def _update(self, metric: Metric, number: int | None, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._calls[self._microbatch()].called("update", own, number, *args, **kwargs)

    def _forward(self, metric: Metric, number: int | None, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        microbatch = self._microbatch()
        if number is None:
            self._inputs.setdefault(id(metric), {})[microbatch] = (args, kwargs)
        else:  # a copy computes what `forward` returns
            metric = self._copies[id(metric)][microbatch]
            own = metric.forward
        return self._calls[microbatch].called(
            "forward", partial(self._values.forward, metric, own), number, *args, **kwargs
        )

    def _compute(self, metric: Metric, number: int | None, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._calls[self._microbatch()].verified("compute", metric, own, *args, **kwargs)

    def _value(self, metric: Metric, inputs: list[_Inputs]) -> Any:
        if id(metric) not in self._copies:
            self._copies[id(metric)] = [empty_copy(metric)]
        (copy,) = self._copies[id(metric)]
        copy.to(metric.device)
        for part in metrics_of(copy):
            put(part, to_sync=part.dist_sync_on_step)  # as `forward` does: a step's value is this process's own
        copy.reset()
        with torch.no_grad():
            for args, kwargs in inputs:
                copy.update(*args, **kwargs)
            value = copy.compute()
        copy.reset()
        return value


def _outermost(module: nn.Module) -> list[Metric]:
    """The metrics of a module that are called by themselves, each once."""
    kinds = (Metric, MetricCollection)
    held = [metric for metric in module.modules() if isinstance(metric, kinds)]
    inside = {id(part) for metric in held for part in metric.modules()}
    plain = [part for part in module.modules() if id(part) not in inside]
    slots = [child for part in plain for child in part._modules.values() if isinstance(child, kinds)]
    return list({id(metric): metric for slot in slots for metric in outermost_metrics(slot)}.values())
