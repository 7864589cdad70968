"""Combine what a metric has accumulated on several ranks, read from a checkpoint, to what one device would have."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from lightning_fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import Running

from .states import Mark, Sent, combined, parts_by_batch

_COMBINED = (dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_mean)


class SavedMetric(NamedTuple):
    """What a metric of one rank has accumulated.

    Args:
        marks: the batches that its growing states come from.
    """

    states: Mapping[str, Any]
    num_updates: int
    marks: Sequence[Mark] = ()

    @classmethod
    def of(cls, metric: Metric, marks: Sequence[Mark]) -> "SavedMetric":
        """Copy what a metric has accumulated to the CPU."""
        return cls(
            _moved(metric.metric_state, torch.device("cpu")),
            metric._num_vals_seen if isinstance(metric, Running) else metric._update_count,
            marks,
        )

    def give(self, metric: Metric) -> None:
        """Let a metric go on from here."""
        for name, state in _moved(self.states, metric.device).items():
            setattr(metric, name, state)
        if isinstance(metric, Running):
            metric._num_vals_seen = self.num_updates
        else:
            metric._update_count = self.num_updates

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> "SavedMetric":
        """Read what `to_dict` returned."""
        return cls(saved["states"], saved["num_updates"], [Mark(*mark) for mark in saved["marks"]])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**self._asdict(), "marks": [tuple(mark) for mark in self.marks]}


def combined_states(metric: Metric, ranks: Sequence[SavedMetric]) -> dict[str, Any] | None:
    """Combine what ranks have accumulated to what one device would have.

    Args:
        metric: the metric, which is not changed.
        ranks: those that updated it, in order of rank.

    Returns:
        The states by name; None if they can't be combined.

    Raises:
        ConfigError: a state is reduced by a plain mean, and the ranks have different values.
    """
    if isinstance(metric, Running):  # which batches are the last ones is known of ranks, not of their sum
        return None
    if len(ranks) == 1:
        return dict(ranks[0].states)
    with torch.inference_mode(False), torch.no_grad():
        copies = [_copy(metric, rank) for rank in ranks]
        if type(metric).merge_state is not Metric.merge_state:
            for other in copies[1:]:  # the states given are put in front
                other.merge_state({name: getattr(copies[0], name) for name in metric._defaults})
                copies[0] = other
            return {name: getattr(copies[0], name) for name in metric._defaults}
        if not all(_is_combined(metric, name) for name in metric._defaults):
            return None
        sent = [
            Sent(type(metric).__name__, rank.num_updates, parts_by_batch(own, rank.marks))
            for own, rank in zip(copies, ranks, strict=True)
        ]
        defaults, reductions = metric._defaults, cast(dict[str, Any], metric._reductions)
        # a list goes on growing
        kinds = {name: None if isinstance(defaults[name], list) else reductions[name] for name in defaults}
        return {name: combined(copies[0], name, kind, sent) for name, kind in kinds.items()}


def _is_combined(metric: Metric, name: str) -> bool:
    reduction: Any = metric._reductions[name]
    return reduction in _COMBINED or (reduction is None and isinstance(metric._defaults[name], list))


def _copy(metric: Metric, rank: SavedMetric) -> Metric:
    own = copy.deepcopy(metric).cpu()
    rank.give(own)
    return own


def _moved(states: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return move_data_to_device(apply_to_collection(dict(states), Tensor, Tensor.detach), device)
