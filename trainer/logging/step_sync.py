"""Reduce values logged by step with `sync_dist=True` together, once per step.

Lightning reduces each value where it is logged, with one collective per key. Here values wait until the step is over
and are updated in place before the next hooks read them. `trainer.callback_metrics` has a rank's own value until then.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...strategies.core.devices import precise_dtype

Reduce = Callable[..., Tensor]


class StepSync:
    """The values of one loop that wait for reduction.

    Every rank must log the same keys in the same order, as in Lightning.
    """

    def __init__(self) -> None:
        self.waits = False
        """Whether the running loop reduces its values after the step."""
        self.weighs = False
        """Whether a value is being logged, whose mean over ranks must be one over samples."""
        self.values: list[tuple[Tensor, str | None, Any]] = []
        """The values that wait, each with its operation and group."""
        self._reduce: Reduce | None = None
        self._weighed: Reduce | None = None

    def through(self, reduce: Reduce, weighed: Reduce) -> Reduce:
        """Return the reduction function for Lightning: it defers inside `log`, and reduces at once elsewhere.

        Args:
            reduce: reduces a value as Lightning does.
            weighed: does so with the weights of the ranks in the current batch.
        """
        self._reduce, self._weighed = reduce, weighed
        return self.reduce

    def reduce(self, value: Tensor, group: Any = None, reduce_op: str | None = "mean") -> Tensor:
        """Defer a value; the returned tensor holds the reduced value after `flush`."""
        if self.waits:
            self.values.append((value, reduce_op, group))
            return value
        reduce = self._weighed if self.weighs else self._reduce
        assert reduce is not None
        return reduce(value, group=group, reduce_op=reduce_op)

    def flush(self) -> None:
        """Reduce all waiting values, with one collective for all that share operation and group.

        Which collectives there are must not depend on what this rank holds: a value's dtype or device may be another
        on other ranks.
        """
        assert self._weighed is not None
        values, self.values = self.values, []
        kinds: dict[tuple[Any, ...], list[Tensor]] = {}
        for value, reduce_op, group in values:
            kinds.setdefault((reduce_op, group), []).append(value)
        for (reduce_op, group), alike in kinds.items():
            device = next((value.device for value in alike if value.device.type != "cpu"), alike[0].device)
            dtype = precise_dtype(device)
            reduced = self._weighed(
                torch.stack([value.to(device, dtype) for value in alike]), group=group, reduce_op=reduce_op
            )
            for value, result in zip(alike, reduced, strict=True):
                value.copy_(result)
