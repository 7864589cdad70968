"""Values logged by step with `sync_dist=True`: reduced over the ranks together, once per step.

Lightning reduces each of them where it is logged, one exchange per key. Here they wait until the step is over, and are
written in place before the hooks after it read them. `trainer.callback_metrics` shows a rank's own value until then.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Reduce = Callable[..., Tensor]


class StepSync:
    """Values of one loop that wait for their reduction.

    Every rank must log the same keys in the same order, as Lightning asks too.
    """

    def __init__(self) -> None:
        self.waits = False
        """Whether values are being logged by a loop that reduces them after its step."""
        self._values: list[tuple[Tensor, str | None, Any]] = []
        self._reduce: Reduce | None = None

    def __len__(self) -> int:
        return len(self._values)

    def through(self, reduce: Reduce) -> Reduce:
        """Return the function that Lightning is to reduce with: it waits inside `log`, and acts at once elsewhere."""
        self._reduce = reduce
        return self.reduce

    def reduce(self, value: Tensor, group: Any = None, reduce_op: str | None = "mean") -> Tensor:
        """Take a value; what is returned holds the reduced one after `flush`."""
        if self.waits:
            self._values.append((value, reduce_op, group))
            return value
        assert self._reduce is not None
        return self._reduce(value, group=group, reduce_op=reduce_op)

    def clear(self) -> None:
        """Forget what an interrupted step has left."""
        self._values.clear()

    def flush(self) -> None:
        """Reduce all waiting values: one exchange for all that agree in operation, group, type and device."""
        assert self._reduce is not None
        values, self._values = self._values, []
        kinds: dict[tuple[Any, ...], list[Tensor]] = {}
        for value, reduce_op, group in values:
            kinds.setdefault((reduce_op, group, value.dtype, value.device), []).append(value)
        for (reduce_op, group, _, _), alike in kinds.items():
            reduced = self._reduce(torch.stack(alike), group=group, reduce_op=reduce_op)
            for value, result in zip(alike, reduced, strict=True):
                value.copy_(result)
