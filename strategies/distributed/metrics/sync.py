"""Compute the values of torchmetrics metrics over all ranks: of an epoch, and of a step.

torchmetrics gathers states one by one, and those that are lists by their elements, so that ranks with different numbers
of elements, or without samples, wait for one another, or abort. Here each rank sends all states of a metric at once.

`forward` of a metric computes the value of the samples it is given, of states that it resets before. These states are
kept when it asks for that value; merged over the ranks, and put into the metric for a moment, they give the batch's.
"""

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.wrappers import Running

from ...core.errors import ConfigError
from ...core.module_checks import metrics_of
from ...core.module_log import NoValue, part_value
from ...core.patching import replaced
from ..objects import gather_objects
from ..store import RankError
from .part_numbers import Part, WeighedUpdate, verified
from .states import CPU, MetricStates, merged_states


class RunMetrics:
    """Computes the values of metrics over all ranks, from `begin` until `end`.

    Attributes:
        is_whole: whether every rank's metrics see the samples of all.
    """

    def __init__(self) -> None:
        self.is_whole, self._replaced = False, ExitStack()
        self._windows: set[int] = set()
        self._counted: dict[int, Mapping[str, Any]] = {}
        # of the step in process: the states of its samples, the metrics that have a value of them, and those in forward
        self._states: dict[int, MetricStates] = {}
        self._keeps: set[int] = set()
        self._open: set[int] = set()
        self._counts = False
        self._told: set[str] = set()

    def begin(self, alone: bool, part: Callable[[], Part]) -> None:
        """Take the place of the metrics' own methods.

        Args:
            alone: whether every rank's metrics see the samples of all.
            part: returns this rank's part of the batch in process.
        """
        self.end()
        self.is_whole = alone
        own = Metric._sync_dist

        def sync_dist(metric: Metric, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
            if dist_sync_fn is not gather_all_tensors:  # the user's own
                own(metric, dist_sync_fn, process_group)
            elif not self.is_whole:
                self._merge(metric, process_group or metric.process_group)

        def replace(kind: type[Metric], name: str, method: Any) -> None:
            self._replaced.enter_context(replaced(kind, name, method))

        for kind in _metric_classes():
            # of the other classes with an exchange of their own, compositions have no states
            if kind is Metric or "_gather_tuple_list" in vars(kind):
                replace(kind, "_sync_dist", sync_dist)
            if "forward" in vars(kind) and not kind.__module__.startswith(("pytorch_lightning", "lightning")):
                replace(kind, "forward", self._recording(kind.forward))
            # `issubclass` of an ABC takes ten times as long
            if "update" in vars(kind) and BaseAggregator in kind.__mro__:
                replace(kind, "update", WeighedUpdate(kind.update, part))

    def end(self) -> None:
        """Restore the metrics' own methods."""
        self._replaced.close()
        self.begin_batch(counts=False)

    def begin_pass(self, module: nn.Module) -> None:
        """Begin another pass over loaders."""
        metrics = metrics_of(module)
        self._windows = {id(metric.base_metric) for metric in metrics if isinstance(metric, Running)}
        for metric in metrics:  # without updates on this rank it may have some on others
            metric._computed = None

    def begin_batch(self, counts: bool) -> None:
        """Forget the last batch; `counts` says whether this rank has any samples of the next one."""
        self._states.clear()
        self._keeps.clear()
        self._counts = counts

    @contextmanager
    def counting(self, metrics: Iterable[tuple[Metric, Mapping[str, Any]]]) -> Generator[None]:
        """Merge what metrics, each given with its attributes, have counted so far, and not what they do inside."""
        with replaced(self, "_counted", {id(metric): attributes for metric, attributes in metrics}):
            yield

    def _merge(self, metric: Metric, group: Any) -> None:
        """Replace a metric's states by those of all ranks; every rank must call it for the same metric."""
        own = self._own(metric)
        for value in own.values:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(_refuse_as_loss, own.kind))
        sent: list[MetricStates] = gather_objects(own.to(CPU), group)
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
        here = dist.get_rank(group)  # whose states may have a graph
        ranks = [own if rank == here else other.to(metric.device) for rank, other in enumerate(sent)]
        for name, state in merged_states(metric, verified(metric, ranks)).items():
            setattr(metric, name, state)

    def _own(self, metric: Metric) -> MetricStates:
        """What this rank sends of a metric: in a step that does not count, what it had before or, if reset, nothing."""
        num, counted = metric._update_count, self._counted.get(id(metric), {})
        if num < counted.get("_update_count", 0) or (counted and num == 1 and metric.dist_sync_on_step):
            return MetricStates({}, 0, type(metric).__name__)
        with ExitStack() as stack:
            for name, value in counted.items():
                stack.enter_context(replaced(metric, name, value))
            return MetricStates.of(metric)

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
                merged = merged_states(part, [rank.to(part.device) for rank in sent])
                count = {"_update_count": max(rank.num_updates for rank in sent), "_computed": None, "_to_sync": False}
                for name, value in {**merged, **count}.items():
                    stack.enter_context(replaced(part, name, value))
            return metric.compute()

    def _keep(self, metric: Metric) -> None:
        for part in metrics_of(metric):
            own = MetricStates.of(part)  # whose lists torchmetrics clears
            states = {name: [*state] if isinstance(state, list) else state for name, state in own.states.items()}
            self._states[id(part)] = own._replace(states=states)

    def _recording(self, forward: Callable[..., Any]) -> Callable[..., Any]:
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


def _metric_classes(kind: type[Metric] = Metric) -> set[type[Metric]]:
    """Return all classes of metrics of this process, `Metric` included."""
    return {kind}.union(*map(_metric_classes, kind.__subclasses__()))


def _refuse_as_loss(metric: str, gradient: Tensor) -> None:
    raise ConfigError(
        f"The loss is the value of a metric, and {metric} has the samples of all ranks (dist_sync_on_step=True), but "
        "the strategy weights each rank's loss as one of its own samples. Set dist_sync_on_step=False."
    )
