"""Step values of a rank that has no samples of a batch: those of the ranks that have."""

from typing import Any

import torch
from torch import Tensor

from ...strategies.core.private import of_metrics
from ...strategies.core.private.of_lightning import ResultCollection, ResultMetric
from ._rank_log import over_ranks


def fill_empty(strategy: Any, results: Any, num: float) -> None:
    """Show on ranks without samples what the others logged by step; all ranks call it for such a batch.

    Args:
        strategy: its `gather_objects` exchanges the values.
        results: what was logged; its `tracked` has the values of this batch.
        num: samples of this rank.
    """
    gathered: list[dict[str, tuple[float, float, str]]] = strategy.gather_objects(_own(results, num))
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
