"""States of torchmetrics metrics as ranks send and save them, and how they are combined."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import torch
from lightning_fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import Running

from ...core.errors import ConfigError

Place: TypeAlias = tuple[int, ...]
"""Position of a global batch; places compare as the batches follow one another on one device."""

BEFORE: Place = ()
"""Place of what a metric held before its first recorded batch."""

GIVEN = "given_per_part"
"""Attribute of an aggregator: whether it was given one value per `sample`, one `number` for a part of a batch, or, by a
hook outside of a step, a number that may be the `whole` batch's or a `count`."""

CPU = torch.device("cpu")


class Mark(NamedTuple):
    """Sizes of a metric's growing states before a batch."""

    place: Place
    sizes: dict[str, int]


class MetricStates(NamedTuple):
    """What a metric of one rank has accumulated, as ranks send and save it.

    Args:
        marks: the batches that its growing states come from.
        kind: its class.
        given: see `GIVEN`.
    """

    states: Mapping[str, Any]
    num_updates: int
    marks: Sequence[Mark] = ()
    kind: str = ""
    given: Set[str] = frozenset()

    @classmethod
    def of(cls, metric: Metric, marks: Sequence[Mark] = ()) -> "MetricStates":
        """Refer to what a metric has accumulated; its lists go on growing."""
        num = metric._num_vals_seen if isinstance(metric, Running) else metric._update_count
        return cls(metric.metric_state, num, marks, type(metric).__name__, vars(metric).get(GIVEN, frozenset()))

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
        return cls(saved["states"], saved["num_updates"], [Mark(*mark) for mark in saved["marks"]])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        marks = [tuple(mark) for mark in self.marks]
        return {"states": self.states, "num_updates": self.num_updates, "marks": marks}


def growing(metric: Metric) -> list[str]:
    """Names of the states that grow with every batch."""
    names = metric._defaults
    return [name for name in names if isinstance(names[name], list) or metric._reductions[name] is dim_zero_cat]


def _pieces(metric: Metric, name: str, state: Any, marks: Sequence[Mark]) -> list[tuple[Place, Any]]:
    """Cut a state by batch: the elements of a list, slices of a growing tensor, or the whole state."""
    if isinstance(state, Tensor) and (name not in growing(metric) or not state.dim()):
        return [(BEFORE, state)]
    cut = [(place, state[start:end]) for place, start, end in ranges(marks, name, len(state))]
    return cut if isinstance(state, Tensor) else [(place, element) for place, part in cut for element in part]


def ranges(marks: Sequence[Mark], name: str, size: int) -> Iterator[tuple[Place, int, int]]:
    """Yield the place, start and end of what each batch added to a state of a given size."""
    if any(mark.sizes[name] > size for mark in marks):
        marks = []  # reset after its last batch
    starts = [0, *(mark.sizes[name] for mark in marks)]
    yield from zip([BEFORE, *(mark.place for mark in marks)], starts, [*starts[1:], size], strict=True)


def combined_states(
    metric: Metric, ranks: Sequence[MetricStates], joins: bool = True, since: Place = BEFORE
) -> dict[str, Any]:
    """Combine what ranks have of a metric to what one device would have, by the metric's own reductions.

    Args:
        metric: the metric, which is not changed.
        joins: whether the elements of lists are joined, as `compute` expects them; else lists go on growing.
        since: the first batch that counts.

    Raises:
        ConfigError: a state is reduced by a plain mean, and ranks have different values of it.
    """
    return {name: _combined(metric, name, ranks, joins, since) for name in metric._reductions}


def _combined(metric: Metric, name: str, ranks: Sequence[MetricStates], joins: bool, since: Place) -> Any:
    default, reduction = metric._defaults[name], dict[str, Any](metric._reductions)[name]
    found = [
        (place, rank, value)
        for rank, own in enumerate(ranks)
        for place, value in (_pieces(metric, name, own.states[name], own.marks) if name in own.states else ())
        if place >= since
    ]
    values = [value for _, _, value in sorted(found, key=lambda entry: entry[:2])]
    if isinstance(default, list):
        return reduction(values) if joins and reduction is not None and values else values
    if reduction is dim_zero_cat:
        return dim_zero_cat(values)
    if len({value.shape for value in values}) > 1:  # states that take their shape from the first update
        values = [value for _, rank, value in found if ranks[rank].num_updates]
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
    """Combine what ranks have saved, those that updated the metric, as `combined_states`; None if it can't be."""
    if isinstance(metric, Running):  # which batches are the last ones is known of ranks, not of their sum
        return None
    if len(ranks) == 1:
        return dict(ranks[0].states)
    known = {dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_mean}
    reductions = dict[str, Any](metric._reductions)
    if any(r not in known and not (r is None and isinstance(metric._defaults[n], list)) for n, r in reductions.items()):
        return None
    with torch.inference_mode(False), torch.no_grad():
        return combined_states(metric, ranks, joins=False)
