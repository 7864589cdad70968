"""Values of metrics for one global batch, of which each rank has given its metric its own part.

`forward` of a metric computes the value of the samples it is given, of states that it resets before. These states are
kept when it asks for that value; combined over the ranks, and put into the metric for a moment, they give the batch's.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torchmetrics import Metric

from ...core.module_checks import metrics_of
from ...core.no_value import NoValue, part_value
from ...core.patching import replaced
from .states import CPU, MetricStates, combined_states


class MetricSteps:
    """Keeps the states of every metric whose `forward` is called in a step."""

    def __init__(self) -> None:
        self._states: dict[int, MetricStates] = {}
        self._keeps: set[int] = set()
        self._open: set[int] = set()
        self._counts = False
        self._told: set[str] = set()

    def begin_batch(self, counts: bool) -> None:
        """Forget the last batch; `counts` says whether this rank has any samples of the next one."""
        self._states.clear()
        self._keeps.clear()
        self._counts = counts

    def recorded(self, metric: Metric) -> bool:
        """Whether the step has called `forward` of a metric, and the metric keeps its value (Running does not)."""
        return id(metric) in self._keeps

    def states(self, metric: Metric) -> list[MetricStates]:
        """The states of a metric that the step has called, and of the metrics in it, for this rank's part of it."""
        nothing = MetricStates({}, 0)
        kept = [self._states.get(id(part), nothing) if self._counts else nothing for part in metrics_of(metric)]
        return [own.to(CPU) for own in kept]

    def value(self, metric: Metric, ranks: Sequence[list[MetricStates]]) -> Any:
        """Compute the metric's value from the states of all ranks for a batch."""
        with ExitStack() as stack, torch.no_grad():
            for part, sent in zip(metrics_of(metric), zip(*ranks, strict=True), strict=True):
                ours = [rank.to(part.device) for rank in sent]
                count = {"_update_count": max(rank.num_updates for rank in sent), "_computed": None, "_to_sync": False}
                for name, value in {**combined_states(part, ours), **count}.items():
                    stack.enter_context(replaced(part, name, value))
            return metric.compute()

    def _keep(self, metric: Metric) -> None:
        for part in metrics_of(metric):
            own = MetricStates.of(part)  # whose lists torchmetrics clears
            states = {name: [*state] if isinstance(state, list) else state for name, state in own.states.items()}
            self._states[id(part)] = own._replace(states=states)

    def recording(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of `forward` of a class."""

        def recorded(metric: Metric, *args: Any, **kwargs: Any) -> Any:
            if id(metric) in self._open:  # a class that calls its parent's forward
                return forward(metric, *args, **kwargs)
            self._open.add(id(metric))
            try:
                value = part_value(metric, partial(forward, metric), self._keep, *args, **kwargs)
                if isinstance(value, NoValue):
                    metric._forward_cache = None
                    if value.reason not in self._told:
                        warnings.warn(value.reason, stacklevel=2)
                        self._told.add(value.reason)
                if isinstance(value, NoValue) or metric._forward_cache is not None:
                    self._keeps.add(id(metric))
                return value
            finally:
                self._open.discard(id(metric))

        return recorded
