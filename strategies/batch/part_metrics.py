"""Count the parts of a batch in copies of a module's metrics, and merge the copies into the metrics after the step."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning_fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from ..core.errors import ConfigError
from ..core.module_checks import is_metric, metrics_of
from ..core.no_value import empty_copy, part_value
from ..core.patching import Replacement, replaced
from ..core.rng import random_state, swapped_random_state
from .metric_calls import Call, call_again, outermost_metrics, takes_whole_batches
from .results import are_equal

_KINDS = (Metric, MetricCollection)
_METHODS = ("update", "forward", "compute", "reset")
_MERGEABLE = (dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min)


class PartMetrics:
    """Brings what the parts of a batch count in a step to the module's metrics, until `close`.

    During a step every part, of a replica or in time, calls a copy that holds this step's samples only. This makes the
    value of the whole batch exact, not only the epoch's. Afterwards

        a metric whose states are sums, lists, minima or maxima   has the copies' states merged into it
        any other, and metrics of metrics                         is called with the joined inputs

    Metrics of single numbers (`MeanMetric`) are of the second kind: a part's loss counts as a part of the batch's. So
    are those that set something of their samples beside their states, which their first step shows. A metric that is a
    part of several others has one copy per part.

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
        outermost = {id(metric): metric for slot in slots for metric in outermost_metrics(slot)}
        self._metrics = list(outermost.values())
        self._copies = [[copies[id(metric)] for copies in made] for metric in self._metrics]
        inside = {id(part) for metric in self._metrics for part in metric.modules() if part is not metric}
        self._recorded = set(range(len(self._metrics)))
        """The metrics of which the first step will show whether they are merged, and those that are not."""
        self._whole = {n for n, metric in enumerate(self._metrics) if id(metric) in inside or not _is_mergeable(metric)}
        self._calls: list[list[Call]] = [[] for _ in made]
        """What the step called of the recorded ones, in order, by part."""
        self._depths = [0 for _ in made]
        """In how many calls of metrics, one within the other, each part is."""
        self._is_open = False
        """Whether a step runs."""
        for i, copies in enumerate(made):
            self._watch(i, copies)
        self._values: dict[int, tuple[Any, Metric]] = {}
        self._replaced = [
            Replacement(inner, method, partial(self._routed, [getattr(copies[key], method) for copies in made]))
            for key, inner in own.items()
            if isinstance(inner, _KINDS)
            for method in _METHODS
        ]

    def _routed(self, copies: Sequence[Any], own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module's metric, in a step that of the running part's copy."""
        return (copies[self._part()] if self._is_open else own)(*args, **kwargs)

    def close(self) -> None:
        """Restore the methods of the module's metrics."""
        while self._replaced:
            self._replaced.pop().remove()

    @contextmanager
    def counting(self) -> Generator[None]:
        """Have the copies take the calls inside the block, where a step runs that is merged afterwards."""
        try:
            with replaced(self, "_is_open", True):
                yield
        except BaseException:
            self._discard()
            raise

    def original(self, value: Any) -> Any:
        """Map what a metric has returned for a part to the whole batch's value; others stay unchanged."""
        found = self._values.get(id(value))
        return value if found is None else found[1]._forward_cache

    def merge(self, used: Sequence[int], sizes: Sequence[int], losses: Sequence[Tensor]) -> None:
        """Bring the counts of the copies to the module's metrics, in order, and reset the copies.

        Args:
            used: the parts that had samples.
            sizes: samples of each of them.
            losses: which the step has returned on each; none if it has not.
        """
        if not self._metrics:
            return
        self._values = {
            id(copy._forward_cache): (copy._forward_cache, metric)
            for metric, copies in zip(self._metrics, self._copies, strict=True)
            for copy in copies
            if isinstance(copy._forward_cache, Tensor)
        }
        with torch.inference_mode(False), torch.no_grad():
            for metric in self._metrics:
                _make_writable(metric)
            for number, (metric, copies) in enumerate(zip(self._metrics, self._copies, strict=True)):
                updated = [copy for copy in copies if copy._update_count > 0]
                if updated and number not in self._whole and self._decide(number, metric, updated):
                    _merge(metric, updated)
            self._calls[:] = [[call for call in calls if call.metric in self._whole] for calls in self._calls]
            call_again(self._metrics, [self._calls[i] for i in used], sizes, self._strategy, losses)
        self._discard()

    def _discard(self) -> None:
        """Reset the copies."""
        for calls in self._calls:
            calls.clear()
        with torch.inference_mode(False), torch.no_grad():
            for number, copies in enumerate(self._copies):
                for copy in copies:
                    if copy._update_count > 0 or number in self._whole:
                        copy.reset()

    def _decide(self, number: int, metric: Metric, copies: Sequence[Metric]) -> bool:
        """Whether a metric is merged; then it is given what `update` set on all copies alike, beside their states."""
        for name, value in vars(copies[0]).items():
            if name.startswith("_") or name in metric._defaults or name in _METHODS:
                continue
            values = [vars(copy).get(name) for copy in copies]
            if value is vars(metric).get(name) or are_equal([vars(metric).get(name), *values]):
                continue
            if not isinstance(value, Tensor) and are_equal(values):
                setattr(metric, name, value)
            elif number in self._recorded:
                self._whole.add(number)
                return False
            else:
                raise ConfigError(
                    f"{self._strategy}: {type(metric).__name__}.update sets {name!r}, which is no state (add_state): "
                    "what replicas set can't be merged. Add it as a state, or update the metric in "
                    "training_step_end or in an epoch hook."
                )
        self._recorded.discard(number)
        return True

    def _watch(self, part: int, copies: Mapping[int, Any]) -> None:
        """Stand between one part's copies, with the metrics inside them, and those who call them."""
        numbers = {id(copies[id(metric)]): number for number, metric in enumerate(self._metrics)}
        for copy in filter(is_metric, copies.values()):
            number = numbers.get(id(copy))  # None inside of another metric
            for method in _METHODS:
                call = getattr(copy, method)
                if method == "forward":
                    call = partial(part_value, copy, call, None)
                if method in ("update", "forward"):
                    call = partial(self._called, part, method, number, call)
                if number is None or method in ("compute", "reset"):
                    call = partial(self._verified, part, f"{type(copy).__name__}.{method}()", call)
                vars(copy)[method] = call

    def _called(
        self, part: int, method: str, number: int | None, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Make a call of a metric's copy, and note it where that is asked for."""
        self._depths[part] += 1
        try:
            if number not in self._recorded or self._depths[part] > 1:
                return call(*args, **kwargs)
            self._calls[part].append(Call(number, method, apply_to_collection((args, kwargs), Tensor, Tensor.detach)))
            if method == "update" and number in self._whole:
                return None  # the root's is called with the inputs of all parts
            with swapped_random_state(random_state()):
                return call(*args, **kwargs)
        finally:
            self._depths[part] -= 1

    def _verified(self, part: int, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call that is not known for a part of a batch.

        Raises:
            ConfigError: a step made it.
        """
        if self._is_open and not self._depths[part]:
            raise ConfigError(
                f"{self._strategy}: {name} was called in a step, where each replica has counted its own chunk only. "
                "Log the metric itself (self.log('name', metric)), or call it in an epoch hook or in training_step_end."
            )
        return call(*args, **kwargs)


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
    if takes_whole_batches(metric):
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
