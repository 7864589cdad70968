"""Have ranks gather and reduce the parts of a module in one order, or say where they don't.

A collective does not know of which part it is: ranks that gather different parts of equal shapes would mix these. So a
rank that is about to call another part than in its last step of the kind meets the others first, who must be about to
call the same. A step like the last one communicates nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

RULE = (
    "All ranks must call the parts of strategy.shard in the same order; set strategy.shard=[], or a list without those "
    "that a rank's samples or random numbers choose."
)


class CallOrder:
    """The order in which this rank has communicated parts.

    Args:
        meet: waits for all ranks, which must come with the same name; its arguments are this, a rule for errors, and
            a number of calls that only a rank can have made that won't come.

    Attributes:
        num: number of calls so far.
    """

    def __init__(self, meet: Callable[[str, str, int], None]) -> None:
        self._meet, self.num = meet, 0
        self._kind: Any = None
        self._orders: dict[Any, list[list[str]]] = {}
        """Of each kind of step, the orders that all ranks have had; the last one first."""
        self._expected, self._now = list[str](), list[str]()

    def begin(self, kind: Any) -> None:
        """Begin a step; steps of one kind mostly call the same parts."""
        self.end()
        self._kind = kind
        self._expected = next(iter(self._orders.get(kind, ())), [])

    def end(self) -> None:
        """End a step: the other ranks, too, must have called as much."""
        if len(self._now) < len(self._expected):
            self._meet("the end of a step", RULE, self.num + 1)
        others = [order for order in self._orders.get(self._kind, ()) if order != self._now]
        self._orders[self._kind] = [self._now, *others[:7]]
        self._expected, self._now = [], []

    def verify(self, call: str) -> None:
        """Have all ranks make this call; the first time that it comes here they meet."""
        self._now.append(call)
        here = len(self._now)
        if self._expected[here - 1 : here] != [call]:
            self._meet(call, RULE, self.num + 1)
            known = self._orders.get(self._kind, ())
            self._expected = next((order for order in known if order[:here] == self._now), [])
        self.num += 1


class InOrder:
    """A collective of a part, as torch's `set_custom_all_gather` and `set_custom_reduce_scatter` take it."""

    def __init__(self, collective: Callable[..., Any], verify: Callable[[], None]) -> None:
        self._collective, self._verify = collective, verify

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is communicated."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        """Communicate."""
        self._verify()
        return self._collective(output_tensor, input_tensor, **options)
