"""Exchange what ranks have logged by step, together, once per step.

Lightning reduces each value where it is logged, with one collective per key. Here values wait until the step is over
and are updated in place before the next hooks read them. `trainer.callback_metrics` has a rank's own value until then.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from pytorch_lightning.strategies import Strategy
from torch import Tensor

from ...strategies.core.devices import precise_dtype
from ...strategies.core.private import of_metrics
from ...strategies.core.private.of_lightning import ResultCollection, ResultMetric
from ...strategies.distributed.metrics.steps import MetricSteps
from ...strategies.distributed.objects import gather_objects
from ...strategies.ranks.strategy import RankStrategy
from ...strategies.registry import ranks_of
from ._rank_log import Logged, over_ranks


def reduce_together(metrics: Iterable[ResultMetric], reduce: Callable[..., Tensor]) -> None:
    """Reduce the step values of metrics, with one collective for all that share operation and group.

    Every rank must have logged the same keys in the same order, as in Lightning. Which collectives there are must not
    depend on what this rank holds: a value's dtype or device may be another on other ranks.
    """
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for metric in metrics:
        sync = metric.meta.sync
        kinds.setdefault((sync.op, sync.group), []).append(of_metrics.forward_cache(metric))
    for (reduce_op, group), alike in kinds.items():
        device = next((value.device for value in alike if value.device.type != "cpu"), alike[0].device)
        dtype = precise_dtype(device)
        reduced = reduce(torch.stack([value.to(device, dtype) for value in alike]), group=group, reduce_op=reduce_op)
        for value, result in zip(alike, reduced, strict=True):
            value.copy_(result)


def fill_empty(results: Any, num: float) -> None:
    """Show on ranks without samples what the others logged by step; all ranks call it for such a batch.

    Args:
        results: what was logged; its `tracked` has the values of this batch.
        num: samples of this rank.
    """
    gathered: list[dict[str, tuple[float, float, str]]] = gather_objects(_own(results, num))
    if num:
        return
    for key, metric in results.items():
        parts = [told[key] for told in gathered if key in told]
        if parts and metric.meta.on_step:
            values, nums, kinds = zip(*parts, strict=True)
            _show(metric, torch.tensor(over_ranks(kinds[0], values, nums), dtype=torch.float64))


def _own(results: Any, num: float) -> dict[str, tuple[float, float, str]]:
    """This rank's values of the batch by key, each with the number of samples and its reduction."""
    if not num:
        return {}
    logged = {id(one.metric) for one in results.tracked}
    kept: ResultCollection = results
    return {
        key: (float(value), num, metric.meta.reduce_fx.__name__ if metric.is_tensor else "own")
        for key, metric in kept.items()
        if id(metric) in logged
        and metric.meta.on_step
        and isinstance(value := of_metrics.forward_cache(metric), Tensor)
    }


def _show(metric: ResultMetric, value: Tensor) -> None:
    state = vars(metric)
    if metric.is_tensor:
        own: Any = metric.value
        cached: Any = state.get(of_metrics.FORWARD_CACHE)  # of the sample that this rank ran in place of its own
        value = value.to(own.device, own.dtype if cached is None else cached.dtype)
        if not metric.meta.on_epoch:
            state["value"] = value
    state[of_metrics.FORWARD_CACHE] = value


def metric_steps_of(strategy: Strategy) -> MetricSteps | None:
    """What computes the values of metrics for one global batch; None if ranks do not share batches."""
    ranks = ranks_of(strategy)
    return None if ranks is None or ranks.contract.metrics is None else ranks.contract.metrics.steps


def share_step_values(ranks: RankStrategy, tracked: Sequence[Logged]) -> None:
    """Replace the values that metrics have for this rank's part of the batch; all ranks must call it.

    Args:
        ranks: the strategy; its `contract.metrics` have recorded the step.
    """
    steps = metric_steps_of(ranks)
    entries = {id(logged.metric): logged.metric for logged in tracked if has_step_value(logged.metric, steps)}
    if steps is None or not entries:
        return
    asked: list[Any] = list(entries.values())
    gathered = gather_objects([steps.states(entry.value) for entry in asked])
    for i, entry in enumerate(asked):
        vars(entry)[of_metrics.FORWARD_CACHE] = steps.value(entry.value, [states[i] for states in gathered])


def has_step_value(entry: ResultMetric, steps: MetricSteps | None) -> bool:
    """Whether a metric is logged whose value of the global batch is asked for, and which the step has called."""
    if entry.is_tensor or not entry.meta.on_step or not entry.meta.sync.should or steps is None:
        return False
    metric: Any = entry.value
    return steps.recorded(metric)
