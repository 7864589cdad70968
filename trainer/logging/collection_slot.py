"""Log the metrics of a collection together: another call of `log_dict` adds a count, and no value."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from operator import is_, itemgetter
from typing import Any, TypeAlias

from torchmetrics import MetricCollection

from ...strategies.core.private import of_metrics
from .slots import Slot

Link: TypeAlias = tuple[Callable[[Any], Sequence[Any]], Mapping[str, Any], Mapping[str, Any]]
"""Two metrics with one state: what reads it, from which attributes of the one and of the other."""

_NAMED_AND_GROUPED = itemgetter(
    "prefix", "postfix", of_metrics.GROUPS, of_metrics.GROUPS_CHECKED, of_metrics.STATE_IS_COPY
)


class CollectionSlot:
    """The slots of a collection's metrics, which one hook logs by epoch with `log_dict`.

    The metrics keep their values themselves, and Lightning's metrics only refer to them.

    Args:
        collection: its metrics share states as `update` leaves them.
        given: the other arguments of `log_dict`.
        slots: one per metric, none of them logged by step.
    """

    def __init__(self, collection: MetricCollection, given: Mapping[str, Any], slots: Sequence[Slot]) -> None:
        self.given, self._slots = given, slots
        self.needs_logger = any(slot.needs_logger for slot in slots)
        self._attributes = vars(collection)
        self._seen = deepcopy(_NAMED_AND_GROUPED(self._attributes))
        metrics: Mapping[str, Any] = self._attributes["_modules"]
        self._names, self._metrics = [*metrics], [*metrics.values()]
        self._links = _links(collection)
        self._num = 0

    def is_current(self) -> bool:
        """Whether the collection has the same metrics under the same names, and they share states."""
        metrics = self._attributes["_modules"]
        return (
            _NAMED_AND_GROUPED(self._attributes) == self._seen
            and [*metrics] == self._names
            and all(map(is_, metrics.values(), self._metrics))  # metrics compared by == make a new metric
            and _are_linked(self._links)
        )

    def add(self) -> None:
        """Log the metrics once more."""
        self._num += 1

    def settle(self) -> None:
        """Write to Lightning's metrics how often they were logged."""
        if self._num:
            for slot in self._slots:
                slot.count(self._num)
            self._num = 0


def shares_states(collection: MetricCollection) -> bool:
    """Whether the metrics of each group have the states of its first, as `update` leaves them.

    `collection.items()`, which `log_dict` calls, sets them all again through `nn.Module.__setattr__`, at the cost of
    an update.
    """
    if not of_metrics.groups_checked(collection) or of_metrics.state_is_copy(collection):
        return False
    return _are_linked(_links(collection))


def _links(collection: MetricCollection) -> list[Link]:
    metrics: Mapping[str, Any] = vars(collection)["_modules"]
    links: list[Link] = []
    for group in of_metrics.groups(collection).values():
        first, *others = [metrics[name] for name in group]
        read = itemgetter(of_metrics.UPDATE_COUNT, *of_metrics.defaults(first))
        if of_metrics.defaults(first):
            links += [(read, vars(other), vars(first)) for other in others]
    return links


def _are_linked(links: Sequence[Link]) -> bool:
    return all(all(map(is_, read(one), read(other))) for read, one, other in links)
