"""States of torchmetrics metrics as ranks send them, and how they are combined."""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

from ...core.errors import ConfigError

Place: TypeAlias = tuple[int, ...]
"""Position of a global batch; places compare as the batches follow one another on one device."""

BEFORE: Place = ()
"""Place of what a metric held before its first recorded batch."""


class Part(NamedTuple):
    """A part of one state of a metric.

    Args:
        place: the global batch it belongs to.
        value: an element of a list state, a slice of a growing tensor, or the whole state.
    """

    state: str
    place: Place
    value: Any


class Sent(NamedTuple):
    """What one rank sends of a metric.

    Args:
        given: see `part_numbers.GIVEN`.
    """

    kind: str
    num_updates: int
    parts: list[Part]
    given: Set[str] = frozenset()


class Mark(NamedTuple):
    """Sizes of a metric's growing states before a batch."""

    place: Place
    sizes: dict[str, int]


def growing(metric: Metric) -> list[str]:
    """Names of the states that grow with every batch."""
    names = metric._defaults
    return [name for name in names if isinstance(names[name], list) or metric._reductions[name] is dim_zero_cat]


def parts_by_batch(metric: Metric, marks: Sequence[Mark]) -> list[Part]:
    """Cut a metric's states into the parts of each batch."""
    return [part for name in metric._reductions for part in _cut(metric, name, marks)]


def _cut(metric: Metric, name: str, marks: Sequence[Mark]) -> Iterator[Part]:
    state = getattr(metric, name)
    if name not in growing(metric) or (isinstance(state, Tensor) and not state.dim()):
        yield Part(name, BEFORE, state)
        return
    for place, start, end in ranges(marks, name, len(state)):
        if isinstance(state, Tensor):
            yield Part(name, place, state[start:end])
        else:
            yield from (Part(name, place, element) for element in state[start:end])


def ranges(marks: Sequence[Mark], name: str, size: int) -> Iterator[tuple[Place, int, int]]:
    """Yield the place, start and end of what each batch added to a state of a given size."""
    if any(mark.sizes[name] > size for mark in marks):
        marks = []  # reset after its last batch
    starts = [0, *(mark.sizes[name] for mark in marks)]
    yield from zip([BEFORE, *(mark.place for mark in marks)], starts, [*starts[1:], size], strict=True)


def moved(sent: Sent, device: torch.device) -> Sent:
    """Copy the tensors that a rank sends to a device: a slice would be sent with all of its storage."""
    parts = [
        part._replace(value=part.value.detach().to(device, copy=True)) if isinstance(part.value, Tensor) else part
        for part in sent.parts
    ]
    return sent._replace(parts=parts)


def metric_classes() -> set[type[Metric]]:
    """Return all classes of metrics of this process, `Metric` included."""
    found: set[type[Metric]] = set()
    left = [Metric]
    while left:
        kind = left.pop()
        if kind not in found:
            found.add(kind)
            left += kind.__subclasses__()
    return found


def combined(metric: Metric, name: str, reduction: Callable[..., Any] | None, ranks: Sequence[Sent]) -> Any:
    """Combine the ranks' parts of one state."""
    default = metric._defaults[name]
    found = [(part, rank) for rank, sent in enumerate(ranks) for part in sent.parts if part.state == name]
    found.sort(key=lambda entry: (entry[0].place, entry[1]))
    values = [part.value for part, _ in found]
    if isinstance(default, list):
        return reduction(values) if reduction is not None and values else values
    if reduction is dim_zero_cat:
        return dim_zero_cat(values)
    if len({value.shape for value in values}) > 1:  # states that take their shape from the first update
        values = [part.value for sent in ranks if sent.num_updates for part in sent.parts if part.state == name]
    if not values:
        return default.to(metric.device)
    if reduction is dim_zero_mean:
        _verify_equal(metric, name, values)
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)


def _verify_equal(metric: Metric, name: str, values: list[Tensor]) -> None:
    if not all(torch.allclose(value, values[0], rtol=0, atol=0, equal_nan=True) for value in values[1:]):
        raise ConfigError(
            f"{type(metric).__name__}: its state {name!r} is reduced by a plain mean over ranks, which have different "
            "numbers of samples. Keep a sum and a count, each with dist_reduce_fx='sum'."
        )
