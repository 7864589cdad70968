"""Have a `ReduceLROnPlateau` that a module steps itself decide by one value on all ranks.

In manual optimization, or in its own `lr_scheduler_step`, a module passes it what it likes: its own loss, or what
`trainer.callback_metrics` has of it. Ranks would then train with learning rates of their own.
"""

from collections.abc import Callable, Iterable
from math import fsum
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import override

from ..data.sampling import Share
from ..distributed.objects import gather_objects


class _Shared(ReduceLROnPlateau):
    """A scheduler while ranks share its batches; it stays the same object, and its state that of its own class."""

    share: Callable[[], Share | None]

    @override
    def step(self, metrics: Any, *args: Any, **options: Any) -> None:
        """Step by the value of the global batch; all ranks must call it."""
        super().step(_over_ranks(float(metrics), self.share()), *args, **options)


def share_plateaus(schedulers: Iterable[Any], share: Callable[[], Share | None]) -> None:
    """Let these schedulers step by the value of the global batch.

    Args:
        schedulers: of any type; only those of type `ReduceLROnPlateau` are changed.
        share: returns this rank's part of the batch in process; None if all ranks have equally many samples.
    """
    for scheduler in schedulers:
        if isinstance(scheduler, ReduceLROnPlateau) and not isinstance(scheduler, _Shared):
            own: Any = type(scheduler)
            scheduler.__class__ = type(own.__name__, (_Shared, own), {"share": staticmethod(share)})


def revert_plateaus(schedulers: Iterable[Any]) -> None:
    """Make them what they were before `share_plateaus`."""
    for scheduler in schedulers:
        if isinstance(scheduler, _Shared):
            scheduler.__class__ = type(scheduler).__bases__[1]


def _over_ranks(value: float, share: Share | None) -> float:
    """The mean of the ranks' values by their samples; exactly their value if they have one in common."""
    told: list[tuple[float, float]] = gather_objects((value, 1.0 if share is None else share.num))
    counted = [(one, num) for one, num in told if num]
    first = counted[0][0]
    if all(one == first for one, _ in counted):
        return first
    return fsum(one * num for one, num in counted) / fsum(num for _, num in counted)
