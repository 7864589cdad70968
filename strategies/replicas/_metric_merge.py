"""Merge the metrics of replicas: a copy on each replica counts its chunk, then is merged into the root's metric."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from ..core.errors import ConfigError
from ._module_copy import copy_metric
from .replicas import Replicas

_MERGEABLE = (dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min)


class MetricMerger:
    """Merges the metrics of all replicas after a step.

    During a step each of the root's metrics is replaced by a copy too, so that every copy holds only this step's
    samples. This makes the value of the whole batch exact, not only the epoch's.

    Args:
        replicas: the replicas that hold the metrics.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._slots = [
            (module, name, child)
            for module in replicas.modules()[0]
            for name, child in module._modules.items()
            if isinstance(child, (Metric, MetricCollection))
        ]
        self._metrics = list({id(metric): metric for _, _, metric in self._slots}.values())
        self._stand_ins = {id(metric): copy_metric(metric, replicas.devices[0]) for metric in self._metrics}
        self._originals = {
            id(copy): metric for leaves in self._all_copies() for metric, *copies in leaves for copy in copies
        }

    @contextmanager
    def standing_in(self) -> Generator[None]:
        """Replace the root's metrics by their copies inside the block."""
        for module, name, metric in self._slots:
            module._modules[name] = self._stand_ins[id(metric)]
        try:
            yield
        finally:
            for module, name, metric in self._slots:
                module._modules[name] = metric

    def original(self, value: Any) -> Any:
        """Map a copy to the root's metric; return any other value unchanged."""
        return self._originals.get(id(value), value)

    def merge(self) -> None:
        """Merge the copies into the root's metrics, in the order of the chunks, and reset the copies."""
        with torch.inference_mode(False), torch.no_grad():
            for leaves in self._all_copies():
                for metric, *copies in leaves:
                    updated = [copy for copy in copies if copy._update_count > 0]
                    if updated:
                        _merge(metric, updated)

    def discard(self) -> None:
        """Reset the copies, after a failed step."""
        for leaves in self._all_copies():
            for _, *copies in leaves:
                for copy in copies:
                    copy.reset()

    def _all_copies(self) -> Iterator[list[tuple[Any, ...]]]:
        """Yield, for each of the root's metrics, its leaf metrics, each with its copies on all replicas."""
        for metric in self._metrics:
            others = [self._replicas.counterpart(i, metric) for i in range(1, len(self._replicas))]
            copies = [self._stand_ins[id(metric)], *others]
            columns = zip(metric.modules(), *(copy.modules() for copy in copies), strict=True)
            yield [leaves for leaves in columns if isinstance(leaves[0], Metric)]


def _merge(metric: Metric, copies: Sequence[Metric]) -> None:
    _verify_mergeable(metric)
    first, *others = copies
    for other in others:
        _append(first, _states(other))
    if any(copy._forward_cache is not None for copy in copies):
        first._computed = None
        metric._forward_cache = first.compute()
    _append(metric, _states(first))
    metric._update_count += 1
    metric._computed = None
    for copy in copies:
        copy.reset()


def _states(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._defaults}


def _append(metric: Metric, states: dict[str, Any]) -> None:
    """Append states to a metric's own; torchmetrics merges the other's in front, so the two are swapped."""
    own = _states(metric)
    for name, state in states.items():
        setattr(metric, name, _moved(state, metric.device))
    if type(metric).merge_state is not Metric.merge_state:
        metric.merge_state(own)
    else:
        metric._reduce_states(own)


def _moved(state: Tensor | list[Tensor], device: torch.device) -> Tensor | list[Tensor]:
    return state.to(device) if isinstance(state, Tensor) else [part.to(device) for part in state]


def _verify_mergeable(metric: Metric) -> None:
    if type(metric).merge_state is not Metric.merge_state:
        return
    for name, default in metric._defaults.items():
        reduction = metric._reductions[name]
        if reduction not in _MERGEABLE and not (reduction is None and isinstance(default, list)):
            raise ConfigError(
                f"{type(metric).__name__}: the reduction of its state {name!r} is not a sum, concatenation, minimum "
                "or maximum, so the states of replicas can't be merged exactly. Define merge_state in the metric, or "
                "update it in training_step_end or in an epoch hook, which run on the root only."
            )
