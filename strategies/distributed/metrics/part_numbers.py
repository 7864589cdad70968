"""Weigh one number that an aggregator of torchmetrics is given for this rank's part of a batch.

`MeanMetric` counts each number alike: of 4 samples a rank with 3 and one with 1 would give it two means of the same
weight. One device gives it one number, the mean over all samples. Each rank's number therefore counts by its part:

    self.train_loss.update(loss)     rank 0, 3 samples: 3/4     rank 1, 1 sample: 1/4     sum 1, as on one device

Counts given to a `SumMetric` add up. The largest, the smallest or the list of such numbers is not known of parts. What
a hook gives counts once, if all ranks give the same, which shows where their states are merged.
"""

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral, Number
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric, SumMetric
from torchmetrics.aggregation import BaseAggregator

from ...core.errors import ConfigError
from ...core.patching import Replacement
from .states import GIVEN, MetricStates

_ROUNDING = 1e-6

Part = tuple[float, bool, str]
"""This rank's fraction of the samples of the batch in process, whether that is one sample, and whose hook runs: that of
a `batch` or of an `epoch`; empty if a step of the module runs. The fraction is 1 outside of a batch."""


class WeighedUpdate:
    """Stands for `update` of a class of aggregators.

    It takes precedence over the method that each metric has in its own dictionary, as a property does.
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
        kinds: set[str] = vars(metric).setdefault(GIVEN, set())
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
                f"{name} was given one number for the samples that this rank has of a batch, of which the number for "
                "the whole batch isn't known: it may be a mean over samples, a sum or another. Give it a tensor with "
                "one value per sample, log the number with self.log(name, number, reduce_fx=...), or update the "
                "metric in an epoch hook."
            )
        kinds.add("number")
        return fraction


def verified(metric: Metric, ranks: Sequence[MetricStates]) -> Sequence[MetricStates]:
    """Count once what hooks gave to an aggregator on all ranks alike.

    Raises:
        ConfigError: it isn't known whether the numbers are a sample's, a rank's or the global batch's.
    """
    name, given = type(metric).__name__, [rank.given for rank in ranks]
    if {"sample"} in given and {"number"} in given:
        raise ConfigError(
            f"{name} was given one value per sample on a rank, but a number on another, which had one sample of each "
            "batch: it isn't known whether that is a sample's or the batch's. Give it tensors of shape (samples,), "
            "with squeeze(1) in place of squeeze(), say."
        )
    if not any("whole" in kinds for kinds in given) or not any(rank.num_updates for rank in ranks):
        return ranks
    first, *others = (rank.values for rank in ranks)
    are_alike = all(len(own) == len(first) and all(map(_is_alike, own, first)) for own in others)
    if are_alike and all(kinds <= {"whole"} for kinds in given):
        return ranks[:1]
    raise ConfigError(
        f"{name} was given numbers by a hook, and others in steps or on other ranks, of which one device's isn't "
        "known. Update it in the step with one value per sample, give it what is the same on all ranks "
        "(self.trainer.strategy.reduce(value) is), or log the number with self.log."
    )


def _is_alike(one: Any, other: Any) -> bool:
    return torch.allclose(one.cpu(), other.cpu(), rtol=_ROUNDING, atol=0, equal_nan=True)
