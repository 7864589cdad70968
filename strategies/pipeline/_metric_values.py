"""Values of torchmetrics metrics for a whole step whose micro-batches each call `forward`.

`forward` adds a micro-batch to the state of the metric and keeps the value of this micro-batch alone, which is what
`self.log` shows as the step's value. Here the value is computed over the inputs of all micro-batches instead.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from ..core.patching import replaced
from ..core.private import of_torch, put

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class MetricValues:
    """Records the inputs of `forward` per micro-batch, for metrics that are logged as objects.

    Args:
        microbatch: returns the micro-batch that runs on the calling thread.
    """

    def __init__(self, modules: Iterable[nn.Module], microbatch: Callable[[], int]) -> None:
        self._microbatch = microbatch
        self._metrics = [module for module in modules if isinstance(module, Metric)]
        self._inputs: dict[int, dict[int, _Inputs]] = {}
        self._copies: dict[int, Metric] = {}

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the inputs of one step."""
        self._inputs = {id(metric): {} for metric in self._metrics}
        with ExitStack() as stack:
            for metric in self._metrics:
                stack.enter_context(replaced(metric, "forward", partial(self._forward, metric, metric.forward)))
            yield

    def _forward(self, metric: Metric, forward: Any, *args: Any, **kwargs: Any) -> Any:
        self._inputs[id(metric)][self._microbatch()] = (args, kwargs)
        return forward(*args, **kwargs)

    def settle(self, metric: Any) -> Any:
        """Make a metric show the value of the whole step.

        Returns:
            The same object.
        """
        inputs = self._inputs.get(id(metric), {})
        if len(inputs) > 1:
            put(metric, forward_cache=self._value(metric, [inputs[microbatch] for microbatch in sorted(inputs)]))
        return metric

    def _value(self, metric: Metric, inputs: list[_Inputs]) -> Any:
        if id(metric) not in self._copies:
            self._copies[id(metric)] = without_hooks(metric)
        copy = self._copies[id(metric)]
        copy.to(metric.device)
        for part in copy.modules():
            if isinstance(part, Metric):
                put(part, to_sync=part.dist_sync_on_step)  # as `forward` does: a step's value is this process's own
        copy.reset()
        with torch.no_grad():
            for args, kwargs in inputs:
                copy.update(*args, **kwargs)
            value = copy.compute()
        copy.reset()
        return value

    def clear(self) -> None:
        """Release the inputs of the last step."""
        self._inputs = {}


def without_hooks(metric: Metric) -> Metric:
    """Copy a metric without its hooks: one that has buffers of its own is a part of a stage, which watches it."""
    with ExitStack() as stack:
        for part in metric.modules():
            for hooks in (of_torch.FORWARD_HOOKS, of_torch.FORWARD_PRE_HOOKS):
                stack.enter_context(replaced(part, hooks, OrderedDict()))
        return metric.clone()
