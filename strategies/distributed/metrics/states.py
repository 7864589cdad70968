"""States of torchmetrics metrics as ranks send and save them, and how they are merged."""

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from lightning_fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric, PearsonCorrCoef
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import Running

from ...core.errors import ConfigError

GIVEN = "given_per_part"
"""Attribute of an aggregator: whether it was given one value per `sample`, one `number` for a part of a batch, or, by a
hook, a number that is the `whole` batch's."""

CPU = torch.device("cpu")


class MetricStates(NamedTuple):
    """What a metric of one rank has accumulated, as ranks send and save it.

    Args:
        kind: its class.
        given: see `GIVEN`.
    """

    states: Mapping[str, Any]
    num_updates: int
    kind: str = ""
    given: Set[str] = frozenset()

    @classmethod
    def of(cls, metric: Metric) -> "MetricStates":
        """Refer to what a metric has accumulated; its lists go on growing."""
        num = metric._num_vals_seen if isinstance(metric, Running) else metric._update_count
        return cls(metric.metric_state, num, type(metric).__name__, vars(metric).get(GIVEN, frozenset()))

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

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> "MetricStates":
        """Read what `to_dict` returned."""
        return cls(saved["states"], saved["num_updates"])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"states": self.states, "num_updates": self.num_updates}


def merged_states(metric: Metric, ranks: Sequence[MetricStates], joins: bool = True) -> dict[str, Any]:
    """Merge what ranks have of a metric to what one device would have, by the metric's own reductions.

    Args:
        metric: the metric, which is not changed.
        ranks: their states; lists are joined in the order of ranks.
        joins: whether the elements of lists are joined, as `compute` expects them; else lists go on growing.

    Raises:
        ConfigError: a state is reduced by a plain mean, and ranks have different values of it.
    """
    merged = {name: _merged(metric, name, ranks, joins) for name in metric._reductions}
    return {**merged, **_widened_deviations(merged)} if isinstance(metric, PearsonCorrCoef) else merged


def _widened_deviations(states: Mapping[str, Any]) -> dict[str, Tensor]:
    """Measure the largest deviations from the mean of all ranks, by which torchmetrics scales the statistics.

    It takes each rank's from the rank's own mean. That is 0 where a rank has equal values only, and the result NaN.
    """
    num, found = states["n_total"], dict[str, Tensor]()
    for axis in "xy":
        means, own = states[f"mean_{axis}"], states[f"max_abs_dev_{axis}"]
        offsets = (means - (num * means).sum(0) / num.sum(0).clamp_min(1)).abs()
        found[f"max_abs_dev_{axis}"] = torch.where(num > 0, own + offsets, own)
    return found


def _merged(metric: Metric, name: str, ranks: Sequence[MetricStates], joins: bool) -> Any:
    default, reduction = metric._defaults[name], dict[str, Any](metric._reductions)[name]
    values = [rank.states[name] for rank in ranks if name in rank.states]
    if isinstance(default, list):
        values = [element for value in values for element in (value if isinstance(value, list) else [value])]
        return reduction(values) if joins and reduction is not None and values else values
    if reduction is dim_zero_cat:
        return dim_zero_cat(values)
    if len({value.shape for value in values}) > 1:  # states that take their shape from the first update
        values = [rank.states[name] for rank in ranks if rank.num_updates]
    if not values:
        return default.to(metric.device)
    if reduction is dim_zero_mean and not all(torch.allclose(v, values[0], 0, 0, equal_nan=True) for v in values):
        raise ConfigError(
            f"{type(metric).__name__}: its state {name!r} is reduced by a plain mean over ranks, which have different "
            "numbers of samples. Keep a sum and a count, each with dist_reduce_fx='sum'."
        )
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)


def resumed_states(metric: Metric, ranks: Sequence[MetricStates]) -> dict[str, Any] | None:
    """Merge what ranks have saved, those that updated the metric, as `merged_states`; None if it can't be."""
    if isinstance(metric, Running):  # which batches are the last ones is known of ranks, not of their sum
        return None
    if len(ranks) == 1:
        return dict(ranks[0].states)
    known = {dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_mean}
    reductions = dict[str, Any](metric._reductions)
    if any(r not in known and not (r is None and isinstance(metric._defaults[n], list)) for n, r in reductions.items()):
        return None
    with torch.inference_mode(False), torch.no_grad():
        return merged_states(metric, ranks, joins=False)
