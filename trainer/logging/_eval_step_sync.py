"""Synchronize values that evaluation logs by step with `sync_dist=True`, once at the end of the epoch.

Ranks may have unequal numbers of batches: with an exchange per step, they would wait for a rank that has none left.
Until the epoch ends each rank keeps its own values and their numbers of samples.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from ...strategies.batch.given_sizes import constant_of
from ...strategies.core.private import of_lightning, of_metrics
from ...strategies.data.loaders import positions
from ...strategies.data.sampling import Share
from ...strategies.distributed.metrics.steps import MetricSteps, Sent
from ._rank_log import over_ranks
from ._step_sync import has_step_value, metric_steps_of

NUM_SAMPLES = "num_samples"
"""Attribute of a result entry that holds the number of samples of its last value."""


@dataclass
class Value:
    """The value that one rank logged under one name in one step.

    Args:
        value: a tensor of shape () until it is sent, then a number.
        num: the `batch_size` that it was logged with, or else its number of samples.
        constant: the same, if it may be a constant for the whole batch.
        samples: its number of samples.
        kind: how ranks are combined: `mean`, `sum`, `max`, `min`, `metric`, or `own` for rank 0's own value.
        metric: for the kind `metric`, the name of the metric in the module, and its states for this rank's samples.
    """

    value: Any
    num: float
    constant: float | None
    samples: float
    kind: str
    dtype: torch.dtype = torch.float32
    metric: tuple[str, list[Sent]] | None = None


Step: TypeAlias = tuple[int, int, dict[str, Value]]
"""Index of the global batch in the epoch, step for the loggers, and values by name."""


class EvalStepSync:
    """The steps of an evaluation whose values wait for the end of the epoch."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def add(self, trainer: pl.Trainer, results: of_lightning.ResultCollection, step: int) -> None:
        """Keep the values that this rank logged in the current batch.

        Args:
            trainer: its loader determines which part of which global batch this is.
        """
        loop: Any = of_lightning.evaluation_loop(trainer)
        places = positions(of_lightning.combined_loader(loop).flattened[results.dataloader_idx or 0])
        count = len(self._steps)
        index = count if places is None else places[count] // trainer.world_size
        share: Share | None = getattr(results, "share", None)
        steps = metric_steps_of(trainer.strategy)
        logged = {
            of_lightning.forked_name(results)(metric, True)[1]: _kept(metric, share, steps)
            for _, metric in results.valid_items()
            if metric.meta.on_step
            and (metric.meta.logger or metric.meta.prog_bar)
            and (has_step_value(metric, steps) or isinstance(of_metrics.forward_cache(metric), Tensor))
        }
        self._steps.append((index, step, logged))

    def take(self) -> list[Step]:
        """Return all steps kept so far, to be sent, and clear them."""
        steps, self._steps = self._steps, []
        kept = [value for _, _, logged in steps for value in logged.values() if value.metric is None]
        if kept:
            numbers = torch.stack([torch.as_tensor(value.value, dtype=torch.float64, device="cpu") for value in kept])
            for value, number in zip(kept, numbers.tolist(), strict=True):
                value.value = number
        return steps


def _kept(metric: of_lightning.ResultMetric, share: Share | None, steps: MetricSteps | None) -> Value:
    if steps is not None and has_step_value(metric, steps):
        own: Any = metric.value
        states = steps.states(own)
        return Value(0.0, 0, None, 0, "metric", metric=(metric.meta.metric_attribute or "", states))
    shared = metric.is_tensor and metric.meta.sync.should and not metric.meta.sync.rank_zero_only
    value: Any = of_metrics.forward_cache(metric)
    num = vars(metric).get(NUM_SAMPLES, 1)
    samples = num if share is None else share.num
    kind = metric.meta.reduce_fx.__name__ if shared else "own"
    return Value(value, num, constant_of(num), samples, kind, value.dtype)


def combine(
    ranks: list[list[Step]], module: pl.LightningModule, metric_steps: MetricSteps | None
) -> list[tuple[int, dict[str, Tensor]]]:
    """Combine the ranks' steps.

    Returns:
        Step for the loggers (rank 0's, continued where only other ranks had a batch) and values by name, in order.
    """
    indices = sorted({index for steps in ranks for index, _, _ in steps})
    numbers = {index: step for index, step, _ in ranks[0]}
    combined: list[tuple[int, dict[str, Tensor]]] = []
    for index in indices:
        step = numbers.get(index, combined[-1][0] + 1 if combined else 0)
        parts = [logged for steps in ranks for other, _, logged in steps if other == index]
        names = dict.fromkeys(name for logged in parts for name in logged)
        logged = {name: [part[name] for part in parts if name in part] for name in names}
        combined.append((step, {name: _value(values, module, metric_steps) for name, values in logged.items()}))
    return combined


def _value(values: list[Value], module: pl.LightningModule, metric_steps: MetricSteps | None) -> Tensor:
    """Combine the values that the ranks logged under a name."""
    first = values[0]
    if first.metric is None or metric_steps is None:
        constants = {value.constant for value in values}
        by_samples = len(constants) == 1 and None not in constants
        weights = [value.samples if by_samples else value.num for value in values]
        return torch.tensor(over_ranks(first.kind, [value.value for value in values], weights), dtype=first.dtype)
    metric = module.get_submodule(first.metric[0])
    assert isinstance(metric, Metric)
    return torch.as_tensor(
        metric_steps.value(metric, [value.metric[1] for value in values if value.metric is not None])
    )
