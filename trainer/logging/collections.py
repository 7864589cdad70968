"""Log the metrics of a collection together: another call of `log_dict` links and names none of them anew."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from operator import is_, itemgetter
from typing import Any, TypeAlias

from torchmetrics import MetricCollection

from .series import Series

Link: TypeAlias = tuple[Callable[[Any], Sequence[Any]], Mapping[str, Any], Mapping[str, Any]]
"""Two metrics with one state: what reads it, from which attributes of the one and of the other."""

_NAMED_AND_GROUPED = itemgetter("prefix", "postfix", "_groups", "_groups_checked", "_state_is_copy")


class LoggedCollection:
    """A collection whose metrics one hook logs by epoch with `log_dict`.

    Args:
        collection: its metrics share states as `update` leaves them.
        given: the other arguments of `log_dict`.
        series: one per metric, none of them logged by step.
    """

    def __init__(self, collection: MetricCollection, given: Mapping[str, Any], series: Sequence[Series]) -> None:
        self.given, self.series = given, series
        self._attributes = vars(collection)
        self._seen = deepcopy(_NAMED_AND_GROUPED(self._attributes))
        metrics: Mapping[str, Any] = self._attributes["_modules"]
        self._names, self._metrics = [*metrics], [*metrics.values()]
        self._links = _links(collection)

    def add(self) -> None:
        """Log the metrics once more: they have their values, and only those computed before are forgotten."""
        for one in self.series:
            one.computed, one.has_reset = None, False

    def is_current(self) -> bool:
        """Whether the collection has the same metrics under the same names, and they share states."""
        metrics = self._attributes["_modules"]
        return (
            _NAMED_AND_GROUPED(self._attributes) == self._seen
            and [*metrics] == self._names
            and all(map(is_, metrics.values(), self._metrics))  # metrics compared by == make a new metric
            and _are_linked(self._links)
        )


def shares_states(collection: MetricCollection) -> bool:
    """Whether the metrics of each group have the states of its first, as `update` leaves them.

    `collection.items()`, which `log_dict` calls, sets them all again through `nn.Module.__setattr__`, at the cost of
    an update.
    """
    if not collection._groups_checked or collection._state_is_copy:
        return False
    return _are_linked(_links(collection))


def _links(collection: MetricCollection) -> list[Link]:
    metrics: Mapping[str, Any] = vars(collection)["_modules"]
    links: list[Link] = []
    for group in collection._groups.values():
        first, *others = [metrics[name] for name in group]
        read = itemgetter("_update_count", *first._defaults)
        if first._defaults:
            links += [(read, vars(other), vars(first)) for other in others]
    return links


def _are_linked(links: Sequence[Link]) -> bool:
    return all(all(map(is_, read(one), read(other))) for read, one, other in links)
