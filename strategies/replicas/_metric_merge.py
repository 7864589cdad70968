"""Merge the metrics of replicas: a copy on each replica counts its chunk, then is merged into the root's metric."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from lightning_fabric.utilities import move_data_to_device
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from ..batch.layout import losses_in
from ..batch.metric_calls import MetricCalls, call_again, opened, outermost_metrics, takes_whole_batches
from ..batch.results import are_equal
from ..core.errors import ConfigError
from ..core.module_checks import metrics_of
from ..core.patching import Replacement
from ..core.private import of_metrics, put
from ._module_copy import copy_metric
from .replicas import Replicas

_METHODS = ("update", "forward", "compute", "reset")
_MERGEABLE = (dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min)


class MetricMerger:
    """Brings what the replicas' metrics counted in a step to the root's metrics.

    During a step calls of the root's metrics go to copies, too, so that every copy holds only this step's samples. This
    makes the value of the whole batch exact, not only the epoch's. Afterwards

        a metric whose states are sums, lists, minima or maxima   has the copies' states merged into it
        any other, and metrics of metrics                         is called on the root, with the joined inputs

    Metrics of single numbers (`MeanMetric`) are of the second kind: a chunk's loss counts as a part of the batch's. A
    metric that is a part of several others has one copy per replica.

    Args:
        strategy: name that begins error messages.
    """

    def __init__(self, replicas: Replicas, strategy: str) -> None:
        self._strategy = strategy
        children = (child for module in replicas.modules()[0] for child in module._modules.values())
        found = {id(child): child for child in children if isinstance(child, (Metric, MetricCollection))}
        memo: dict[int, Any] = {}
        with torch.inference_mode(False), torch.no_grad():
            copied = [(metric, copy_metric(metric, replicas.devices[0], memo)) for metric in found.values()]
        outermost = {id(metric): metric for value in found.values() for metric in outermost_metrics(value)}
        self._metrics = list(outermost.values())
        pairs = [pair for metric, copy in copied for pair in zip(metric.modules(), copy.modules(), strict=True)]
        stand_ins = {id(part): copy for part, copy in pairs}
        others = range(1, len(replicas))
        self._copies = [
            [stand_ins[id(metric)], *(replicas.counterpart(i, metric) for i in others)] for metric in self._metrics
        ]
        inside = {id(part) for metric in self._metrics for part in metric.modules() if part is not metric}
        self._is_merged = [id(metric) not in inside and is_mergeable(metric) for metric in self._metrics]
        self._calls = [MetricCalls(strategy) for _ in replicas.devices]
        for i, calls in enumerate(self._calls):
            self._watch(calls, [copies[i] for copies in self._copies])
        self._originals = {
            id(copy): metric for metric, own in zip(self._metrics, self._copies, strict=True) for copy in own
        }
        self._values: dict[int, tuple[Any, Metric]] = {}
        parts = {id(part): part for part, _ in pairs if isinstance(part, (Metric, MetricCollection))}
        self._replaced = [
            Replacement(part, method, partial(self._routed, getattr(stand_ins[key], method)))
            for key, part in parts.items()
            for method in _METHODS
        ]

    def _routed(self, stand_in: Callable[..., Any], own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of a metric of the root, in a step that of its copy."""
        return (stand_in if self._calls[0].is_open else own)(*args, **kwargs)

    def close(self) -> None:
        """Restore the methods of the root's metrics."""
        while self._replaced:
            self._replaced.pop().remove()

    def standing_in(self) -> AbstractContextManager[None]:
        """Have the copies take the calls of the root's metrics inside the block."""
        return opened(self._calls)

    def original(self, value: Any) -> Any:
        """Map a copy to the root's metric, and the value of a chunk to the whole batch's; others stay unchanged."""
        if isinstance(value, Tensor):
            found = self._values.get(id(value))
            return value if found is None else of_metrics.forward_cache(found[1])
        return self._originals.get(id(value), value)

    def merge(self, used: Sequence[int], sizes: Sequence[int], outputs: Sequence[Any]) -> None:
        """Bring the counts of the copies that had samples to the root's metrics, in order, and reset the copies.

        Args:
            outputs: what the step has returned on each of them.
        """
        self._values = {
            id(of_metrics.forward_cache(copy)): (of_metrics.forward_cache(copy), metric)
            for metric, copies in zip(self._metrics, self._copies, strict=True)
            for copy in copies
            if isinstance(of_metrics.forward_cache(copy), Tensor)
        }
        with torch.inference_mode(False), torch.no_grad():
            for metric in self._metrics:
                _make_writable(metric)
            for metric, copies, is_merged in zip(self._metrics, self._copies, self._is_merged, strict=True):
                updated = [copy for copy in copies if of_metrics.update_count(copy) > 0]
                if is_merged and updated:
                    self._carry_attributes(metric, updated)
                    _merge(metric, updated)
            losses = [loss for output in outputs for loss in losses_in(output)]
            call_again(self._metrics, [self._calls[i] for i in used], sizes, self._strategy, losses)
        self.discard()

    def discard(self) -> None:
        """Reset the copies."""
        for calls in self._calls:
            calls.calls.clear()
        with torch.inference_mode(False), torch.no_grad():
            for copies, is_merged in zip(self._copies, self._is_merged, strict=True):
                for copy in copies:
                    if of_metrics.update_count(copy) > 0 or not is_merged:
                        copy.reset()

    def _carry_attributes(self, metric: Metric, copies: Sequence[Metric]) -> None:
        """Give the root's metric what `update` set on its copies beside their states, where that is known."""
        for name, value in vars(copies[0]).items():
            if name.startswith("_") or name in of_metrics.defaults(metric) or name in _METHODS:
                continue
            values = [vars(copy).get(name) for copy in copies]
            if value is vars(metric).get(name) or are_equal([vars(metric).get(name), *values]):
                continue
            if isinstance(value, Tensor) or not are_equal(values):
                raise ConfigError(
                    f"{self._strategy}: {type(metric).__name__}.update sets {name!r}, which is no state (add_state): "
                    "what replicas set can't be merged. Add it as a state, or update the metric in "
                    "training_step_end or in an epoch hook."
                )
            setattr(metric, name, value)

    def _watch(self, calls: MetricCalls, copies: Sequence[Any]) -> None:
        """Watch one replica's copies, and the metrics inside them."""
        for number, copy in enumerate(copies):
            calls.watch(copy, number, not self._is_merged[number])
        seen = {id(copy) for copy in copies}
        parts = {id(part): part for copy in copies for part in metrics_of(copy)}
        for part in (part for key, part in parts.items() if key not in seen):
            calls.watch(part, None, False)


def is_mergeable(metric: Metric) -> bool:
    """Whether merging the states that were counted on parts of a batch gives the whole batch's."""
    if takes_whole_batches(metric):
        return False
    if type(metric).merge_state is not Metric.merge_state:
        return True
    return all(
        of_metrics.reductions(metric)[name] in _MERGEABLE
        or (of_metrics.reductions(metric)[name] is None and isinstance(default, list))
        for name, default in of_metrics.defaults(metric).items()
    )


def _make_writable(metric: Metric) -> None:
    """Replace states that a hook of a test or prediction has reset: in inference mode they become inference tensors."""
    for part in metrics_of(metric):
        for name in of_metrics.defaults(part):
            state = getattr(part, name)
            if isinstance(state, Tensor) and state.is_inference():
                setattr(part, name, state.clone())


def _merge(metric: Metric, copies: Sequence[Metric]) -> None:
    first, *others = copies
    for other in others:
        _append(first, _states(other))
    if any(of_metrics.forward_cache(copy) is not None for copy in copies):
        put(metric, forward_cache=_own_value(first))
    _append(metric, _states(first))
    put(metric, update_count=of_metrics.update_count(metric) + 1, computed=None)


def _own_value(metric: Metric) -> Any:
    """What a metric's `forward` returns: the value of the states of this rank, as other ranks may have had no step."""
    parts = metrics_of(metric)
    try:
        for part in parts:
            put(part, computed=None, to_sync=part.dist_sync_on_step)
        return metric.compute()
    finally:
        for part in parts:
            put(part, to_sync=part.sync_on_compute)


def _states(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in of_metrics.defaults(metric)}


def _append(metric: Metric, states: dict[str, Any]) -> None:
    """Append states to a metric's own; torchmetrics merges the other's in front, so the two are swapped."""
    own = _states(metric)
    for name, state in states.items():
        setattr(metric, name, move_data_to_device(state, metric.device))
    if type(metric).merge_state is not Metric.merge_state:
        metric.merge_state(own)
    else:
        of_metrics.reduce_states(metric)(own)
