"""Compute the values of torchmetrics metrics over all ranks, exactly.

torchmetrics gathers states one by one, and those that are lists by their elements, so that ranks with different numbers
of elements, or without samples, wait for one another, or abort. Here each rank sends all states of a metric at once.
"""

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Integral, Number
from typing import Any, NamedTuple

import torch
from lightning_fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, SumMetric
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.wrappers import Running

from ..core.errors import ConfigError
from ..core.module_checks import metrics_of
from ..core.module_log import NoValue, NoValueError, no_value
from ..core.patching import Replacement, replaced
from .objects import gather_objects
from .store import RankError

_CPU = torch.device("cpu")
_GIVEN = "given_per_part"
"""Attribute of an aggregator: whether it was given one value per `sample`, one `number` for a part of a batch, or, by a
hook, a number that is the `whole` batch's."""

Part = tuple[float, bool, str]
"""This rank's fraction of the samples of the batch in process, whether that is one sample, and whose hook runs: that of
a `batch` or of an `epoch`; empty if a step of the module runs. The fraction is 1 outside of a batch."""


class MetricStates(NamedTuple):
    """What a metric of one rank has accumulated, as ranks send and save it; `given`: see `_GIVEN`."""

    states: Mapping[str, Any]
    num_updates: int
    kind: str = ""
    given: Set[str] = frozenset()

    @classmethod
    def of(cls, metric: Metric) -> "MetricStates":
        """Refer to what a metric has accumulated; its lists go on growing."""
        num = metric._num_vals_seen if isinstance(metric, Running) else metric._update_count
        return cls(metric.metric_state, num, type(metric).__name__, vars(metric).get(_GIVEN, frozenset()))

    @property
    def values(self) -> list[Any]:
        """The states, each element of a list by itself."""
        return [value for state in self.states.values() for value in (state if isinstance(state, list) else [state])]

    def to(self, device: torch.device) -> "MetricStates":
        """Copy tensors to a device: a slice would be sent with all of its storage."""

        def copied(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, copy=True)

        return self._replace(states=apply_to_collection(dict(self.states), Tensor, copied))

    def give(self, metric: Metric) -> None:
        """Let a metric go on from here."""
        states = apply_to_collection(dict(self.states), Tensor, Tensor.detach)
        for name, state in move_data_to_device(states, metric.device).items():
            setattr(metric, name, state)
        setattr(metric, "_num_vals_seen" if isinstance(metric, Running) else "_update_count", self.num_updates)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, which are the first two arguments."""
        return {"states": self.states, "num_updates": self.num_updates}


def merged_states(metric: Metric, ranks: Sequence[MetricStates], joins: bool = True) -> dict[str, Any]:
    """Merge what ranks have of a metric by its own reductions; lists that go on growing don't `join` their elements."""
    counted = [rank.states for rank in ranks if rank.num_updates] or [rank.states for rank in ranks]
    merged: dict[str, Any] = {}
    for name, reduction in dict[str, Any](metric._reductions).items():
        values, default = [states[name] for states in counted if name in states], metric._defaults[name]
        if isinstance(default, list):
            values = [element for value in values for element in (value if isinstance(value, list) else [value])]
            merged[name] = reduction(values) if joins and reduction is not None and values else values
        elif not values:
            merged[name] = default.to(metric.device)
        elif reduction is dim_zero_cat:
            merged[name] = dim_zero_cat(values)
        elif reduction is dim_zero_mean and not _are_alike(values, values[:1] * len(values), rtol=0):
            raise ConfigError(
                f"{type(metric).__name__}: its state {name!r} is reduced by a plain mean over ranks, which have "
                "different numbers of samples. Keep a sum and a count, each with dist_reduce_fx='sum'."
            )
        else:
            merged[name] = torch.stack(values) if reduction is None else reduction(torch.stack(values))
    return merged


def resumed_states(metric: Metric, ranks: Sequence[MetricStates]) -> dict[str, Any] | None:
    """Merge what ranks have saved, those that updated the metric, as `merged_states`; None if it can't be."""
    if isinstance(metric, Running):  # which batches are the last ones is known of ranks, not of their sum
        return None
    if len(ranks) == 1:
        return dict(ranks[0].states)
    known = (dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_mean)
    for name, reduction in dict[str, Any](metric._reductions).items():
        if reduction not in known and not (reduction is None and isinstance(metric._defaults[name], list)):
            return None
    with torch.inference_mode(False), torch.no_grad():
        return merged_states(metric, ranks, joins=False)


class RunMetrics:
    """Computes the values of metrics over all ranks, from `begin` until `end`."""

    def __init__(self) -> None:
        self._replaced = ExitStack()
        self.is_whole = False  # whether every rank's metrics see the samples of all
        self._windows: set[int] = set()
        self._counted: dict[int, Mapping[str, Any]] = {}

    def begin(self, alone: bool, part: Callable[[], Part]) -> None:
        """Take the place of the metrics' own methods; `alone`: see `is_whole`; `part` returns that in process."""
        self.end()
        self.is_whole = alone
        own = Metric._sync_dist

        def sync_dist(metric: Metric, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
            if dist_sync_fn is not gather_all_tensors:  # the user's own
                own(metric, dist_sync_fn, process_group)
            elif not self.is_whole:
                self._merge(metric, process_group or metric.process_group)

        for kind in _metric_classes():
            put: dict[str, Any] = {}
            # of the other classes with an exchange of their own, compositions have no states
            if kind is Metric or "_gather_tuple_list" in vars(kind):
                put["_sync_dist"] = sync_dist
            if "forward" in vars(kind) and not kind.__module__.startswith(("pytorch_lightning", "lightning")):
                put["forward"] = _of_rank(kind.forward)
            # `issubclass` of an ABC takes ten times as long
            if "update" in vars(kind) and BaseAggregator in kind.__mro__:
                put["update"] = _WeighedUpdate(kind.update, part)
            for name, method in put.items():
                self._replaced.enter_context(replaced(kind, name, method))

    def end(self) -> None:
        """Restore the metrics' own methods."""
        self._replaced.close()

    def begin_pass(self, module: nn.Module) -> None:
        """Begin another pass over loaders."""
        metrics = metrics_of(module)
        self._windows = {id(metric.base_metric) for metric in metrics if isinstance(metric, Running)}
        for metric in metrics:  # without updates on this rank it may have some on others
            metric._computed = None

    @contextmanager
    def counting(self, metrics: Iterable[tuple[Metric, Mapping[str, Any]]]) -> Generator[None]:
        """Merge what metrics, each given with its attributes, have counted so far, and not what they do inside."""
        with replaced(self, "_counted", {id(metric): attributes for metric, attributes in metrics}):
            yield

    def _merge(self, metric: Metric, group: Any) -> None:
        """Replace a metric's states by those of all ranks; every rank must call it for the same metric."""
        own = self._own(metric)
        sent: list[MetricStates] = gather_objects(own.to(_CPU), group)
        for rank, other in enumerate(sent):
            if other.kind != own.kind:
                raise RankError(
                    f"The metric {own.kind} is computed over all ranks, but rank {rank} computes {other.kind}. "
                    "Compute the same metrics in the same order on all ranks."
                )
        if id(metric) in self._windows and len({rank.num_updates for rank in sent}) > 1:
            raise ConfigError(
                f"Running({own.kind}): its window holds other batches on some ranks, which had no samples of a batch. "
                f"Set drop_last=True in the loader, or use {own.kind} without a window."
            )
        ranks = _counted_once([rank.to(metric.device) for rank in sent])
        for name, state in merged_states(metric, ranks).items():
            setattr(metric, name, state)

    def _own(self, metric: Metric) -> MetricStates:
        """What this rank sends of a metric: in a step that does not count, what it had before or, if reset, nothing."""
        num, counted = metric._update_count, self._counted.get(id(metric), {})
        if num < counted.get("_update_count", 0):
            return MetricStates({}, 0, type(metric).__name__)
        with ExitStack() as stack:
            for name, value in counted.items():
                stack.enter_context(replaced(metric, name, value))
            return MetricStates.of(metric)


def _of_rank(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What takes the place of `forward` of a class: a rank's samples may be too few for a value."""

    def called(metric: Metric, *args: Any, **kwargs: Any) -> Any:
        compute = metric.compute

        def computed() -> Any:
            try:
                return compute()
            except (ValueError, RuntimeError, IndexError, ZeroDivisionError) as exc:
                return no_value(
                    f"{type(metric).__name__}: the value of a part of the batch can't be computed ({exc}). Log the "
                    "metric itself, which has the epoch's value."
                )

        with replaced(metric, "compute", computed), replaced(metric, "dist_sync_on_step", False):
            try:
                value = forward(metric, *args, **kwargs)
            except NoValueError as exc:  # of a metric within this one
                value = no_value(str(exc))
        if isinstance(value, NoValue):
            metric._forward_cache = None
            warnings.warn(value.reason, stacklevel=2)
        return value

    return called


class _WeighedUpdate:
    """Stands for `update` of a class of aggregators: a number counts by its rank's part, as `MeanMetric` doesn't.

    It comes before the method that each metric has in its own dictionary.
    """

    def __init__(self, own: Callable[..., None], part: Callable[[], Part]) -> None:
        self.own, self._part = own, part

    def __get__(self, metric: Any, kind: type[Metric]) -> Any:
        if metric is None or "update" not in vars(metric):  # one that is being made wraps the method of its class
            return self.own.__get__(metric)
        own = vars(metric)["update"]
        if isinstance(own, Replacement):
            return partial(own.call, partial(self._update, metric, own.own))
        return partial(self._update, metric, own)

    def __set__(self, metric: Any, update: Callable[..., None]) -> None:
        vars(metric)["update"] = update

    def _update(self, metric: BaseAggregator, update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        number, *weights = (*args, *kwargs.values())
        kinds: set[str] = vars(metric).setdefault(_GIVEN, set())
        weight = 1.0
        if not (isinstance(number, Number) or (isinstance(number, Tensor) and not number.dim())):
            kinds.add("sample")
        elif not weights:  # else that of the part
            weight = self._weight(metric, number, kinds)
        before = {name: vars(metric)[name].clone() for name in ("mean_value", "weight") if weight != 1.0}
        update(*args, **kwargs)
        for name, value in before.items():  # by its states, as not all metrics take a weight into account
            setattr(metric, name, value.lerp(vars(metric)[name], weight))

    def _weight(self, metric: BaseAggregator, number: Any, kinds: set[str]) -> float:
        """What a number counts for; note what it is."""
        fraction, is_one, hook = self._part()
        is_whole = not number.is_floating_point() if isinstance(number, Tensor) else isinstance(number, Integral)
        adds, is_mean = isinstance(metric, SumMetric) and is_whole, isinstance(metric, MeanMetric)
        if hook == "epoch" or (hook and not adds and not is_mean):
            kinds.add("whole")
            return 1.0
        # a rank without samples undoes its step; one value was squeezed
        if adds or fraction == 1.0 or not (hook or fraction) or (is_one and "sample" in kinds):
            return 1.0
        if not is_mean:
            name = type(metric).__name__
            raise ConfigError(
                f"{name} was given one number for the samples that this rank has of a batch, and not the whole batch's "
                "(a mean, a sum or another). Give it a tensor with one value per sample, log the number with "
                "self.log(name, number, reduce_fx=...), or update the metric in an epoch hook."
            )
        kinds.add("number")
        return fraction


def _counted_once(ranks: Sequence[MetricStates]) -> Sequence[MetricStates]:
    """Count once what hooks gave to an aggregator on all ranks alike; refuse numbers of which it isn't known."""
    given, (first, *others) = [rank.given for rank in ranks], [rank.values for rank in ranks]
    by_hook = any("whole" in kinds for kinds in given) and any(rank.num_updates for rank in ranks)
    if by_hook and all(kinds <= {"whole"} for kinds in given) and all(_are_alike(own, first) for own in others):
        return ranks[:1]
    if by_hook or ({"sample"} in given and {"number"} in given):
        which = "by a hook, and others in steps or on other ranks" if by_hook else "on a rank, on another a sample's"
        raise ConfigError(
            f"{ranks[0].kind} was given numbers {which}, of which one device's isn't known. Update it in the step with "
            "one value per sample, of shape (samples,) also of one (squeeze(1) in place of squeeze(), say), give it "
            "what is the same on all ranks (self.trainer.strategy.reduce(value) is), or log the number with self.log."
        )
    return ranks


def _are_alike(own: Sequence[Tensor], other: Sequence[Tensor], rtol: float = 1e-6) -> bool:
    return len(own) == len(other) and all(
        torch.allclose(a.cpu(), b.cpu(), rtol=rtol, atol=0, equal_nan=True) for a, b in zip(own, other, strict=True)
    )


def _metric_classes(kind: type[Metric] = Metric) -> set[type[Metric]]:
    """Return all classes of metrics of this process, `Metric` included."""
    return {kind}.union(*map(_metric_classes, kind.__subclasses__()))
