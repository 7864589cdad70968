"""Combine the states of torchmetrics metrics over all ranks, exactly and in the order of one device.

torchmetrics gathers the elements of a list state one by one, so that ranks with different numbers of elements wait for
one another, or abort; it also puts all of a rank's batches before the next rank's. Here each rank sends its states at
once, each part with the batch it belongs to:

    rank 0   batch 0: a b      batch 1: e          one device   a b c d e
    rank 1   batch 0: c d
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric, PearsonCorrCoef
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.wrappers import Running

from ...core.errors import ConfigError
from ...core.module_checks import metrics_of
from ...core.patching import replaced
from ..objects import gather_objects
from ..store import RankError
from .part_numbers import Part, WeighedUpdate, verified
from .states import BEFORE, CPU, Mark, MetricStates, Place, combined_states, growing, ranges
from .steps import MetricSteps


class MetricSync:
    """Replaces torchmetrics' own exchange between ranks."""

    def __init__(self, is_whole: bool = False) -> None:
        self.is_whole = is_whole
        self._marks: dict[int, list[Mark]] = {}
        self.watched: list[Metric] = []
        """The metrics whose states grow; without any, nothing happens at a batch."""
        self._num_passes = 0
        self._windows: dict[int, Running] = {}
        self._counted: dict[int, Mapping[str, Any]] = {}

    def begin_pass(self, module: nn.Module) -> None:
        """Record in which batch of another pass over loaders the states of the module's metrics grow."""
        self._num_passes += 1
        metrics = metrics_of(module)
        for metric in metrics:  # without updates on this rank it may have some on others
            metric._computed = None
        self._windows = {id(metric.base_metric): metric for metric in metrics if isinstance(metric, Running)}
        self.watched = [metric for metric in metrics if isinstance(metric, Running) or growing(metric)]
        known = {id(metric) for metric in self.watched}
        self._marks = {key: marks for key, marks in self._marks.items() if key in known}

    def begin_batch(self, place: Place) -> None:
        """Record that what metrics receive next belongs to a batch of this pass."""
        for metric in self.watched:
            sizes = _sizes(metric)
            marks = self._marks.setdefault(id(metric), [])
            if marks and any(size < marks[-1].sizes[name] for name, size in sizes.items()):
                marks.clear()  # the metric was reset
            if marks and sizes == marks[-1].sizes:
                marks.pop()  # nothing came from the last batch
            marks.append(Mark((self._num_passes, *place), sizes))

    @contextmanager
    def counting(self, metrics: Iterable[tuple[Metric, Mapping[str, Any]]]) -> Generator[None]:
        """Combine what metrics, each given with its attributes, have counted so far, and not what they do inside."""
        with replaced(self, "_counted", {id(metric): attributes for metric, attributes in metrics}):
            yield

    def combine(self, metric: Metric, group: Any = None) -> None:
        """Replace a metric's states by those of all ranks; every rank must call it for the same metric."""
        if self.is_whole:
            return
        window = self._windows.get(id(metric))
        own = self._own(metric, window)
        for value in own.values:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(_refuse_as_loss, own.kind))
        ranks = verified(metric, _gather(own, metric.device, group))
        since = BEFORE
        if window is not None:  # of the updates of all ranks, as many as it holds
            places = sorted({mark.place for rank in ranks for mark in rank.marks})[-window.window :]
            since = places[0] if places else BEFORE
        for name, state in combined_states(metric, ranks, since=since).items():
            setattr(metric, name, state)
        if isinstance(metric, PearsonCorrCoef):
            _widen_deviations(metric)

    def _own(self, metric: Metric, window: Running | None) -> MetricStates:
        """What this rank sends of a metric: in a step that does not count, what it had before or, if reset, nothing."""
        num, counted = metric._update_count, self._counted.get(id(metric), {})
        if num < counted.get("_update_count", 0) or (counted and num == 1 and metric.dist_sync_on_step):
            return MetricStates({}, 0, kind=type(metric).__name__)
        with ExitStack() as stack:
            for name, value in counted.items():
                stack.enter_context(replaced(metric, name, value))
            own = MetricStates.of(metric, self.marks_of(metric))
            if window is None:
                return own
            for name, value in self._counted.get(id(window), {}).items():
                stack.enter_context(replaced(window, name, value))
            return own._replace(**_last_updates(window, self.marks_of(window)))

    def marks_of(self, metric: Metric) -> list[Mark]:
        """The batches from which a metric's growing states come."""
        return self._marks.get(id(metric), [])

    def restore_marks(self, metric: Metric, marks: Sequence[Mark]) -> None:
        """Restore what `marks_of` returned when the states were saved."""
        if marks:
            self._marks[id(metric)] = list(marks)


class RunMetrics:
    """Computes the values of metrics over all ranks, from `begin` until `end`.

    Attributes:
        sync: the exchange of metric states between ranks.
        steps: computes the values that metrics have for one global batch.
    """

    def __init__(self) -> None:
        self.sync, self.steps, self._replaced = MetricSync(), MetricSteps(), ExitStack()

    def begin(self, alone: bool, part: Callable[[], Part]) -> None:
        """Take the place of the metrics' own methods.

        Args:
            alone: whether every rank's metrics see the samples of all.
            part: returns this rank's part of the batch in process.
        """
        self.end()
        self.sync, self.steps = MetricSync(alone), MetricSteps()
        own, combine = Metric._sync_dist, self.sync.combine

        def sync_dist(metric: Metric, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
            if dist_sync_fn is not gather_all_tensors:  # the user's own
                own(metric, dist_sync_fn, process_group)
            else:
                combine(metric, process_group or metric.process_group)

        def replace(kind: type[Metric], name: str, method: Any) -> None:
            self._replaced.enter_context(replaced(kind, name, method))

        for kind in _metric_classes():
            # of the other classes with an exchange of their own, compositions have no states
            if kind is Metric or "_gather_tuple_list" in vars(kind):
                replace(kind, "_sync_dist", sync_dist)
            if "forward" in vars(kind) and not kind.__module__.startswith(("pytorch_lightning", "lightning")):
                replace(kind, "forward", self.steps.recording(kind.forward))
            # `issubclass` of an ABC takes ten times as long
            if "update" in vars(kind) and BaseAggregator in kind.__mro__:
                replace(kind, "update", WeighedUpdate(kind.update, part))

    def end(self) -> None:
        """Restore the metrics' own methods."""
        self._replaced.close()
        self.steps.begin_batch(counts=False)


def _metric_classes(kind: type[Metric] = Metric) -> set[type[Metric]]:
    """Return all classes of metrics of this process, `Metric` included."""
    return {kind}.union(*map(_metric_classes, kind.__subclasses__()))


def _widen_deviations(metric: PearsonCorrCoef) -> None:
    """Measure the largest deviations from the mean of all ranks, by which torchmetrics scales the statistics.

    It takes each rank's from the rank's own mean. That is 0 where a rank has equal values only, and the result NaN.
    """
    num: Any = metric.n_total
    total = num.sum(0).clamp_min(1)
    for axis in "xy":
        means: Any = getattr(metric, f"mean_{axis}")
        own: Any = getattr(metric, f"max_abs_dev_{axis}")
        offsets = (means - (num * means).sum(0) / total).abs()
        setattr(metric, f"max_abs_dev_{axis}", torch.where(num > 0, own + offsets, own))


def _refuse_as_loss(metric: str, gradient: Tensor) -> None:
    raise ConfigError(
        f"The loss is the value of a metric, and {metric} has the samples of all ranks (dist_sync_on_step=True), but "
        "the strategy weights each rank's loss as one of its own samples. Set dist_sync_on_step=False; if the loss is "
        'a mean over something other than samples, also return {"loss": loss, "loss_weight": n} from training_step.'
    )


def _sizes(metric: Metric) -> dict[str, int]:
    if isinstance(metric, Running):
        return {"": metric._num_vals_seen}
    states = {name: getattr(metric, name) for name in growing(metric)}
    return {name: 1 if isinstance(state, Tensor) and not state.dim() else len(state) for name, state in states.items()}


def _last_updates(window: Running, marks: list[Mark]) -> dict[str, Any]:
    """The states of the last updates that a running window holds, and the place of each."""
    seen, base = window._num_vals_seen, window.base_metric
    states: dict[str, list[Any]] = {name: [] for name in base._defaults}
    updates = list[Mark]()
    for place, start, end in ranges(marks, "", seen):
        for number in range(max(start, seen - window.window), end):
            if place == BEFORE or place[-1] < 0:
                raise ConfigError(
                    f"Running({type(base).__name__}): the order of batches over ranks is unknown here. "
                    "Make the metric an attribute of the module, and update it in its steps; loaders without a "
                    "sampler need strategy.batch_size_is=global."
                )
            updates.append(Mark((*place, number - start), {name: len(values) for name, values in states.items()}))
            for name, values in states.items():
                slot = getattr(window, f"{name}_{number % window.window}")
                values += slot if isinstance(slot, list) else [slot]
    return {"states": states, "marks": updates}


def _gather(own: MetricStates, home: torch.device, group: Any) -> list[MetricStates]:
    """Gather what all ranks send; the other ranks' tensors are moved to `home`."""
    ranks: list[MetricStates] = gather_objects(own.to(CPU), group)
    for rank, sent in enumerate(ranks):
        if sent.kind != ranks[0].kind:
            raise RankError(
                f"rank 0 computes the metric {ranks[0].kind} over all ranks, but rank {rank} computes {sent.kind}. "
                "Compute the same metrics in the same order on all ranks."
            )
    return [own if rank == dist.get_rank(group) else sent.to(home) for rank, sent in enumerate(ranks)]
