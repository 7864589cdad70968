"""Compute the step values of metrics that are logged with `sync_dist=True` over all ranks."""

from collections.abc import Sequence
from typing import Any

from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultMetric

from ...strategies.distributed.metrics.steps import MetricSteps
from ._rank_log import Logged


def share_step_values(strategy: Any, tracked: Sequence[Logged]) -> None:
    """Replace the values that metrics have for this rank's part of the batch; all ranks must call it.

    Args:
        strategy: its `metric_steps` has recorded the step, and its `gather_objects` exchanges the states.
        tracked: what was logged in the batch.
    """
    steps: MetricSteps | None = getattr(strategy, "metric_steps", None)
    entries = {id(logged.metric): logged.metric for logged in tracked if has_step_value(logged.metric, steps)}
    if steps is None or not entries:
        return
    asked: list[Any] = list(entries.values())
    ranks = strategy.gather_objects([steps.states(entry.value) for entry in asked])
    for i, entry in enumerate(asked):
        vars(entry)["_forward_cache"] = steps.value(entry.value, [states[i] for states in ranks])


def has_step_value(entry: _ResultMetric, steps: MetricSteps | None) -> bool:
    """Whether a metric is logged whose value of the global batch is asked for, and which the step has called."""
    if entry.is_tensor or not entry.meta.on_step or not entry.meta.sync.should or steps is None:
        return False
    metric: Any = entry.value
    return steps.recorded(metric)
