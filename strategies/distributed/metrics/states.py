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

Pieces: TypeAlias = list[tuple[Place, Any]]
"""One state of a metric by batch: elements of a list, slices of a growing tensor, or the whole state."""

CPU = torch.device("cpu")


class Mark(NamedTuple):
    """Sizes of a metric's growing states before a batch."""

    place: Place
    sizes: dict[str, int]


class Sent(NamedTuple):
    """What one rank sends of a metric.

    Args:
        given: see `part_numbers.GIVEN`.
    """

    kind: str
    num_updates: int
    states: Mapping[str, Pieces]
    given: Set[str] = frozenset()

    @classmethod
    def of(cls, metric: Metric, marks: Sequence[Mark] = (), given: Set[str] = frozenset()) -> "Sent":
        """Cut what a metric has accumulated into the pieces of each batch."""
        states = {name: pieces(metric, name, getattr(metric, name), marks) for name in metric._reductions}
        return cls(type(metric).__name__, metric._update_count, states, given)

    def to(self, device: torch.device) -> "Sent":
        """Copy tensors to a device: a slice would be sent with all of its storage."""

        def copied(value: Any) -> Any:
            return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value

        states = {name: [(at, copied(value)) for at, value in own] for name, own in self.states.items()}
        return self._replace(states=states)


class SavedMetric(NamedTuple):
    """What a metric of one rank has accumulated, in a checkpoint.

    Args:
        marks: the batches that its growing states come from.
    """

    states: Mapping[str, Any]
    num_updates: int
    marks: Sequence[Mark] = ()

    @classmethod
    def of(cls, metric: Metric, marks: Sequence[Mark]) -> "SavedMetric":
        """Refer to what a metric has accumulated; its lists go on growing."""
        num = metric._num_vals_seen if isinstance(metric, Running) else metric._update_count
        return cls(metric.metric_state, num, marks)

    def give(self, metric: Metric) -> None:
        """Let a metric go on from here."""
        states = apply_to_collection(dict(self.states), Tensor, Tensor.detach)
        for name, state in move_data_to_device(states, metric.device).items():
            setattr(metric, name, state)
        setattr(metric, "_num_vals_seen" if isinstance(metric, Running) else "_update_count", self.num_updates)

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> "SavedMetric":
        """Read what `to_dict` returned."""
        return cls(saved["states"], saved["num_updates"], [Mark(*mark) for mark in saved["marks"]])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**self._asdict(), "marks": [tuple(mark) for mark in self.marks]}


def growing(metric: Metric) -> list[str]:
    """Names of the states that grow with every batch."""
    names = metric._defaults
    return [name for name in names if isinstance(names[name], list) or metric._reductions[name] is dim_zero_cat]


def pieces(metric: Metric, name: str, state: Any, marks: Sequence[Mark]) -> Pieces:
    """Cut a state of a metric into the pieces of each batch."""
    if name not in growing(metric) or (isinstance(state, Tensor) and not state.dim()):
        return [(BEFORE, state)]
    cut = [(place, state[start:end]) for place, start, end in ranges(marks, name, len(state))]
    return cut if isinstance(state, Tensor) else [(place, element) for place, part in cut for element in part]


def ranges(marks: Sequence[Mark], name: str, size: int) -> Iterator[tuple[Place, int, int]]:
    """Yield the place, start and end of what each batch added to a state of a given size."""
    if any(mark.sizes[name] > size for mark in marks):
        marks = []  # reset after its last batch
    starts = [0, *(mark.sizes[name] for mark in marks)]
    yield from zip([BEFORE, *(mark.place for mark in marks)], starts, [*starts[1:], size], strict=True)


def combined_states(metric: Metric, ranks: Sequence[Sent], joins: bool = True) -> dict[str, Any]:
    """Combine what ranks have of a metric to what one device would have, by the metric's own reductions.

    Args:
        metric: the metric, which is not changed.
        joins: whether the elements of lists are joined, as `compute` expects them; else lists go on growing.

    Raises:
        ConfigError: a state is reduced by a plain mean, and ranks have different values of it.
    """
    return {name: _combined(metric, name, ranks, joins) for name in metric._reductions}


def _combined(metric: Metric, name: str, ranks: Sequence[Sent], joins: bool) -> Any:
    default, reduction = metric._defaults[name], dict[str, Any](metric._reductions)[name]
    found = [(place, rank, value) for rank, sent in enumerate(ranks) for place, value in sent.states.get(name, ())]
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


def resumed_states(metric: Metric, ranks: Sequence[SavedMetric]) -> dict[str, Any] | None:
    """Combine what ranks have saved, those that updated the metric, as `combined_states`; None if it can't be."""
    if isinstance(metric, Running):  # which batches are the last ones is known of ranks, not of their sum
        return None
    if len(ranks) == 1:
        return dict(ranks[0].states)
    known = {dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_mean}
    reductions = dict[str, Any](metric._reductions)
    if any(r not in known and not (r is None and isinstance(metric._defaults[n], list)) for n, r in reductions.items()):
        return None
    cut = [{name: pieces(metric, name, rank.states[name], rank.marks) for name in reductions} for rank in ranks]
    sent = [Sent("", rank.num_updates, own) for rank, own in zip(ranks, cut, strict=True)]
    with torch.inference_mode(False), torch.no_grad():
        return combined_states(metric, sent, joins=False)
