"""Count the parts of a batch in copies of a module's metrics, and merge the copies into the metrics after the step."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Number
from typing import Any

import torch
from lightning_fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from ..core.errors import PartsDiffer
from ..core.module_checks import is_metric, metrics_of, why_whole
from ..core.no_value import empty_copy, part_value
from ..core.patching import Replacement, replaced
from .results import are_equal

_KINDS = (Metric, MetricCollection)
_METHODS = ("update", "forward", "compute", "reset")
_MERGEABLE = (dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min)


class OfParts:
    """Has a metric take what parts of a batch give it, as far as the whole batch's states follow from theirs.

    A number that a `MeanMetric` is given for a part counts by its samples. Metrics whose states don't merge, or that
    are made of others, raise `PartsDiffer`, and so do numbers that may be sums or means: steps get whole batches.

    Args:
        samples: returns those of the part that calls, and of the batch.
        strategy: name that begins messages.
    """

    def __init__(self, metric: Metric, samples: Callable[[], tuple[float, float]], strategy: str) -> None:
        self._metric, self._samples = metric, samples
        self._name = f"{strategy}: {type(metric).__name__}"
        self._is_mergeable = _is_mergeable(metric)
        self._depth = 0
        """In how many calls, one within the other, the metric is."""
        self._replaced = [Replacement(metric, method, partial(self._called, method)) for method in _METHODS]

    def remove(self) -> None:
        """Restore the metric's methods."""
        while self._replaced:
            self._replaced.pop().remove()

    def _called(self, method: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._is_mergeable:
            raise PartsDiffer(
                f"{self._name} is called on a part of a batch, and what it counts of parts can't be merged. Call it in "
                "training_step_end or in an epoch hook"
            )
        if method in ("compute", "reset") and not self._depth:
            raise PartsDiffer(
                f"{self._name}.{method}() is called in a step, where a part of the batch is counted. Log the metric "
                "itself (self.log('name', metric)), or call it in an epoch hook or in training_step_end"
            )
        if method == "forward":
            own = partial(part_value, self._metric, own, None)
        elif method == "update" and isinstance(self._metric, BaseAggregator):
            args, kwargs = (), self._weighed(dict(zip(("value", "weight"), args, strict=False)) | kwargs)
        self._depth += 1
        try:
            return own(*args, **kwargs)
        finally:
            self._depth -= 1

    def _weighed(self, given: dict[str, Any]) -> dict[str, Any]:
        value, num, total = given["value"], *self._samples()
        if not (isinstance(value, Number) or (isinstance(value, Tensor) and not value.dim())) or num == total:
            return given
        is_mean = isinstance(self._metric, MeanMetric)
        if is_mean and given.get("weight") is None:
            return given | {"weight": num / total}
        count = given["weight"] if is_mean else value if isinstance(self._metric, SumMetric) else None
        if not (isinstance(count, Tensor) and (is_mean or not count.is_floating_point())) and count != num:
            raise PartsDiffer(
                f"{self._name} is given one number for a part of a batch, from which the whole batch's isn't known: it "
                "may be a mean over samples, a sum or another. Give it a tensor with one value per sample, or update "
                "it in training_step_end or in an epoch hook"
            )
        return given


class PartMetrics:
    """Brings what the parts of a batch count in a step to the module's metrics, until `close`.

    During a step every part, of a replica or in time, calls a copy that holds this step's samples only, whose states
    are merged into the metric's afterwards. This makes the value of the whole batch exact, not only the epoch's.

    Args:
        module: the module, whose metrics all parts call.
        devices: of each part a batch may have; None for where the metrics are.
        strategy: name that begins error messages.
        part: returns which part runs on the calling thread.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device | None],
        strategy: str,
        part: Callable[[], int],
    ) -> None:
        self._strategy, self._part = strategy, part
        slots = _metric_slots(module)
        self.found = [id(slot) for slot in slots]
        """Identifies the metrics and collections of the module."""
        own = {id(inner): inner for slot in slots for inner in slot.modules()}
        made = [_empty_copies(slots, device) for device in devices]
        self._copies = [(metric, [copies[id(metric)] for copies in made]) for metric in outermost_metrics(slots)]
        self._sizes: Sequence[float] = ()
        self._is_open = False
        """Whether a step runs."""
        for i, copies in enumerate(made):
            for copy in filter(is_metric, copies.values()):
                OfParts(copy, partial(self._samples, i), strategy)
        self._values: dict[int, tuple[Any, Metric]] = {}
        self._replaced = [
            Replacement(inner, method, partial(self._routed, [getattr(copies[key], method) for copies in made]))
            for key, inner in own.items()
            if isinstance(inner, _KINDS)
            for method in _METHODS
        ]

    def _samples(self, part: int) -> tuple[float, float]:
        return self._sizes[part], sum(self._sizes)

    def _routed(self, copies: Sequence[Any], own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module's metric, in a step that of the running part's copy."""
        return (copies[self._part()] if self._is_open else own)(*args, **kwargs)

    def close(self) -> None:
        """Restore the methods of the module's metrics."""
        while self._replaced:
            self._replaced.pop().remove()

    @contextmanager
    def counting(self, sizes: Sequence[float]) -> Generator[None]:
        """Have the copies take the calls inside the block, where a step runs, and merge what they have counted.

        Args:
            sizes: samples of each part.
        """
        self._sizes = sizes
        try:
            with replaced(self, "_is_open", True):
                yield
            self._merge()
        finally:
            with torch.inference_mode(False), torch.no_grad():
                for copy in (copy for _, copies in self._copies for copy in copies if copy._update_count > 0):
                    type(copy).reset(copy)

    def original(self, value: Any) -> Any:
        """Map what a metric has returned for a part to the whole batch's value; others stay unchanged."""
        found = self._values.get(id(value))
        return value if found is None else found[1]._forward_cache

    def _merge(self) -> None:
        """Bring the counts of the copies to the module's metrics, in order."""
        every = list[tuple[Metric, list[Metric]]]()
        for metric, copies in self._copies:
            counts = {copy._update_count for copy, num in zip(copies, self._sizes, strict=False) if num}
            if len(counts) > 1 and isinstance(metric, BaseAggregator):
                raise PartsDiffer(
                    f"{self._strategy}: {type(metric).__name__} is not updated alike on all parts of a batch, so that "
                    "their numbers don't make the batch's. Update it in every step, whatever the samples are"
                )
            if any(counts):
                every.append((metric, [copy for copy in copies if copy._update_count > 0]))
        self._values = {
            id(copy._forward_cache): (copy._forward_cache, metric)
            for metric, copies in every
            for copy in copies
            if isinstance(copy._forward_cache, Tensor)
        }
        with torch.inference_mode(False), torch.no_grad():
            for metric, copies in every:
                self._take_attributes(metric, copies)
            for metric, copies in every:
                _make_writable(metric)
                _merge(metric, copies)

    def _take_attributes(self, metric: Metric, copies: Sequence[Metric]) -> None:
        """Give a metric what `update` set on all copies alike, beside their states."""
        for name, value in vars(copies[0]).items():
            if name.startswith("_") or name in metric._defaults or name in _METHODS:
                continue
            values = [vars(copy).get(name) for copy in copies]
            if value is vars(metric).get(name) or are_equal([vars(metric).get(name), *values]):
                continue
            if isinstance(value, Tensor) or not are_equal(values):
                raise PartsDiffer(
                    f"{self._strategy}: {type(metric).__name__}.update sets {name!r}, which is no state (add_state), "
                    "and what parts of a batch set can't be merged. Add it as a state, or update the metric in "
                    "training_step_end or in an epoch hook"
                )
            setattr(metric, name, value)


def outermost_metrics(values: Sequence[nn.Module]) -> list[Metric]:
    """The metrics that are called by themselves, each once: metrics, and the members of collections."""
    found = dict[int, Metric]()
    for value in values:
        children = [child for child in value._modules.values() if child is not None]
        found |= {id(one): one for one in ([value] if is_metric(value) else outermost_metrics(children))}
    return list(found.values())


def _empty_copies(slots: Sequence[nn.Module], device: torch.device | None) -> dict[int, Any]:
    """Copies of metrics and of all in them, by the identity of the original."""
    memo: dict[int, Any] = {}
    with torch.inference_mode(False), torch.no_grad():
        pairs = [(slot, empty_copy(slot, memo).to(device)) for slot in slots]
    return {id(a): b for slot, copy in pairs for a, b in zip(slot.modules(), copy.modules(), strict=True)}


def _metric_slots(module: nn.Module) -> list[nn.Module]:
    """The metrics and collections of a module that are in no other, each once."""
    held = [part for part in module.modules() if isinstance(part, _KINDS)]
    inside = {id(part) for metric in held for part in metric.modules()}
    plain = [part for part in module.modules() if id(part) not in inside]
    found = (child for part in plain for child in part._modules.values() if isinstance(child, _KINDS))
    return list({id(slot): slot for slot in found}.values())


def finds_others(module: nn.Module, found: Sequence[int]) -> bool:
    """Whether a module has other metrics than those of `PartMetrics.found`."""
    return [id(slot) for slot in _metric_slots(module)] != list(found)


def _is_mergeable(metric: Metric) -> bool:
    """Whether merging the states that were counted on parts of a batch gives the whole batch's."""
    if why_whole(metric) is not None or any(
        isinstance(part, _KINDS) for part in metric.modules() if part is not metric
    ):
        return False
    if type(metric).merge_state is not Metric.merge_state:
        return True
    return all(
        metric._reductions[name] in _MERGEABLE or (metric._reductions[name] is None and isinstance(default, list))
        for name, default in metric._defaults.items()
    )


def _make_writable(metric: Metric) -> None:
    """Replace states that a hook of a test or prediction has reset: in inference mode they become inference tensors."""
    for part in metrics_of(metric):
        for name in part._defaults:
            state = getattr(part, name)
            if isinstance(state, Tensor) and state.is_inference():
                setattr(part, name, state.clone())


def _merge(metric: Metric, copies: Sequence[Metric]) -> None:
    first, *others = copies
    for other in others:
        _append(first, _states(other))
    if any(copy._forward_cache is not None for copy in copies):
        metric._forward_cache = _own_value(first)
    _append(metric, _states(first))
    metric._update_count = metric._update_count + 1
    metric._computed = None


def _own_value(metric: Metric) -> Any:
    """What a metric's `forward` returns: the value of the states of this rank, as other ranks may have had no step."""
    parts = metrics_of(metric)
    try:
        for part in parts:
            part._computed = None
            part._to_sync = part.dist_sync_on_step
        return metric.compute()
    finally:
        for part in parts:
            part._to_sync = part.sync_on_compute


def _states(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._defaults}


def _append(metric: Metric, states: dict[str, Any]) -> None:
    """Append states to a metric's own; torchmetrics merges the other's in front, so the two are swapped."""
    own = _states(metric)
    for name, state in states.items():
        setattr(metric, name, move_data_to_device(state, metric.device))
    if type(metric).merge_state is not Metric.merge_state:
        metric.merge_state(own)
    else:
        metric._reduce_states(own)
