"""Weigh one number that an aggregator of torchmetrics is given for this rank's part of a batch.

`MeanMetric` counts each number alike: of 4 samples a rank with 3 and one with 1 would give it two means of the same
weight. One device gives it one number, the mean over all samples. Each rank's number therefore counts by its part:

    self.train_loss.update(loss)     rank 0, 3 samples: 3/4     rank 1, 1 sample: 1/4     sum 1, as on one device

The largest, the smallest or the list of such numbers is not known of parts, and their sum may be a sum of means.

What a hook gives, outside of a step, is one device's if all ranks give the same (the norm of a gradient, the value of
another metric). It counts once; whether it is the same shows where the ranks' states are combined.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from numbers import Integral, Number
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric, SumMetric
from torchmetrics.aggregation import BaseAggregator

from ...core.errors import ConfigError
from .states import Sent

GIVEN = "given_per_part"
"""Attribute of an aggregator: whether it was given one value per `sample`, one `number` for a part of a batch, or, by a
hook outside of a step, a number that may be the `whole` batch's or a `count`."""

_ROUNDING = 1e-6


class PartNumbers:
    """Stands before `update` of every aggregator while a run lasts.

    Args:
        part: returns this rank's fraction of the samples of the batch in process, and whether that is one sample; None
            outside of a batch, and if this rank has all of its samples; of one without samples the fraction is 0.
        hook: returns whose hook runs, that of a `batch` or of an `epoch`; empty if a step of the module runs.
    """

    def __init__(self, part: Callable[[], tuple[float, bool] | None], hook: Callable[[], str]) -> None:
        self._part, self._hook = part, hook
        self._lock = RLock()  # micro-batches may run in threads

    def methods(self, kinds: Iterable[type[Metric]]) -> Iterator[tuple[type[Metric], str, Any]]:
        """Yield what takes the place of `update` of aggregators: the class, the method's name and the method."""
        for kind in kinds:
            # `issubclass` of an ABC takes ten times as long
            if BaseAggregator in kind.__mro__ and "update" in vars(kind):
                yield kind, "update", _Update(kind.update, self._update)

    def _update(self, metric: BaseAggregator, update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        given = [*args, *kwargs.values()]
        kinds: set[str] = vars(metric).setdefault(GIVEN, set())
        weight = None
        if not _is_number(given[0]):
            kinds.add("sample")
        elif len(given) == 1:  # a weight that is given is that of the part
            weight = self._weight(metric, given[0], kinds)
        if weight is None:
            update(*args, **kwargs)
            return
        with self._lock:  # by its states, as not all metrics take a weight into account
            states = vars(metric)  # which `setattr` writes to at several times the cost
            before = {name: states[name] for name in ("mean_value", "weight")}
            states.update({name: torch.zeros_like(value) for name, value in before.items()})
            update(*args, **kwargs)
            states.update({name: torch.add(value, states[name], alpha=weight) for name, value in before.items()})

    def _weight(self, metric: BaseAggregator, number: Any, kinds: set[str]) -> float | None:
        """What a number counts for, and note what it is; None for one that counts as it is."""
        part, hook, adds = self._part(), self._hook(), isinstance(metric, SumMetric) and not _is_fraction(number)
        if hook == "epoch" or (hook and not adds and not isinstance(metric, MeanMetric)):
            kinds.add("count" if adds else "whole")
            return None
        if adds or part is None or not (hook or part[0]):  # counts add up; a rank without samples undoes its step
            return None
        if part[1] and "sample" in kinds:  # one value, squeezed
            return None
        if not isinstance(metric, MeanMetric):
            name = type(metric).__name__
            raise ConfigError(
                f"{name} was given one number for the samples that this rank has of a batch, of which the number for "
                "the whole batch isn't known: it may be a mean over samples, a sum or another. Give it a tensor with "
                "one value per sample, log the number with self.log(name, number, reduce_fx=...), or update the "
                "metric in an epoch hook."
            )
        kinds.add("number")
        return part[0]


class _Update:
    """Takes precedence over the method that each metric has in its own dictionary, as a property does."""

    def __init__(self, own: Callable[..., None], call: Callable[..., None]) -> None:
        self.own, self._call = own, call

    def __get__(self, metric: Any, kind: type[Metric]) -> Any:
        if metric is None:
            return self.own
        update = vars(metric).get("update")
        # a metric that is being made wraps the method of its class
        return self.own.__get__(metric) if update is None else partial(self._call, metric, update)

    def __set__(self, metric: Any, update: Callable[..., None]) -> None:
        vars(metric)["update"] = update


def verify_given(name: str, ranks: Iterable[Set[str]]) -> None:
    """Refuse what ranks were given for one metric, of which it isn't known what it is.

    Raises:
        ConfigError: one value per sample on a rank, and on another, which had one sample each time, a number.
    """
    kinds = [kinds for kinds in ranks if kinds]
    if {"sample"} in kinds and {"number"} in kinds:
        raise ConfigError(
            f"{name} was given one value per sample on a rank, but a number on another, which had one sample of each "
            "batch: it isn't known whether that is a sample's or the batch's. Give it tensors of shape (samples,), "
            "with squeeze(1) in place of squeeze(), say."
        )


def verify_whole(metric: Metric, ranks: Sequence[Sent]) -> Sequence[Sent]:
    """Count once what hooks gave to an aggregator on all ranks alike.

    Args:
        ranks: what all ranks send of the metric.

    Returns:
        What is combined.

    Raises:
        ConfigError: it isn't known whether the numbers are a rank's or the global batch's.
    """
    kinds = {kind for rank in ranks for kind in rank.given}
    if not kinds & {"whole", "count"} or not any(rank.num_updates for rank in ranks):
        return ranks
    values = [[value for pieces in rank.states.values() for _, value in pieces] for rank in ranks]
    are_alike = all(_are_alike(values[0], others) for others in values[1:])
    if are_alike and kinds == {"whole"}:
        return ranks[:1]
    if not are_alike and kinds == {"count"}:
        return ranks  # of each rank's own samples
    told = "the same whole numbers" if are_alike else "different numbers"
    raise ConfigError(
        f"{type(metric).__name__} was given numbers by a hook, outside of a step, and ranks have {told}, of which one "
        "device's isn't known. Update it in the step with one value per sample, give it what is the same on all ranks "
        "(self.trainer.strategy.reduce(value) is) as a float, or log the number with self.log."
    )


def _are_alike(values: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(values) == len(others) and all(
        torch.allclose(one.cpu(), two.cpu(), rtol=_ROUNDING, atol=0, equal_nan=True)
        for one, two in zip(values, others, strict=True)
    )


def _is_number(value: Any) -> bool:
    return not value.dim() if isinstance(value, Tensor) else isinstance(value, Number)


def _is_fraction(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else not isinstance(value, Integral)
