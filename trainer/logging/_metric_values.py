"""Compute the step values of metrics that are logged with `sync_dist=True` over all ranks."""

from collections.abc import Sequence
from typing import Any

from pytorch_lightning.strategies import Strategy

from ...strategies import DDPStrategy
from ...strategies.core.private.of_lightning import ResultMetric
from ...strategies.core.private.of_metrics import FORWARD_CACHE
from ...strategies.distributed.metrics.steps import MetricSteps
from ...strategies.registry import ranks_of
from ._rank_log import Logged


def metric_steps_of(strategy: Strategy) -> MetricSteps | None:
    """What computes the values of metrics for one global batch; None if ranks do not share batches."""
    ranks = ranks_of(strategy)
    return None if ranks is None or ranks.metrics is None else ranks.metrics.steps


def share_step_values(ranks: DDPStrategy, tracked: Sequence[Logged]) -> None:
    """Replace the values that metrics have for this rank's part of the batch; all ranks must call it.

    Args:
        ranks: the strategy; its `metrics` have recorded the step, and its `gather_objects` exchanges the states.
    """
    steps = metric_steps_of(ranks)
    entries = {id(logged.metric): logged.metric for logged in tracked if has_step_value(logged.metric, steps)}
    if steps is None or not entries:
        return
    asked: list[Any] = list(entries.values())
    gathered = ranks.gather_objects([steps.states(entry.value) for entry in asked])
    for i, entry in enumerate(asked):
        vars(entry)[FORWARD_CACHE] = steps.value(entry.value, [states[i] for states in gathered])


def has_step_value(entry: ResultMetric, steps: MetricSteps | None) -> bool:
    """Whether a metric is logged whose value of the global batch is asked for, and which the step has called."""
    if entry.is_tensor or not entry.meta.on_step or not entry.meta.sync.should or steps is None:
        return False
    metric: Any = entry.value
    return steps.recorded(metric)
