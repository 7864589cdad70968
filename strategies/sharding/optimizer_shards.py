"""Cut the state of optimizers over ranks that hold whole parameters (ZeRO, stage 1).

Each parameter has an owner, by size. An optimizer updates the parameters that its rank owns, and so keeps state for
these alone; after the step the owners send them to the other ranks. The update of an elementwise optimizer does not
depend on what else it updates, so that the weights are bitwise those of whole optimizers.

Source: Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from ..core.devices import buckets
from ..core.errors import ConfigError
from ..core.loop_contract import before_update
from .whole import broadcast_together

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop,
    optim.Adagrad, optim.Adadelta, optim.ASGD,
)  # fmt: skip
"""Optimizers whose update of an element depends on this element, its gradient and its state alone."""

BUCKET_BYTES = 25 * 2**20

MOST_BUCKETS = 2
"""Number of buckets that torch has under way at one time, and so in memory beside the parameters."""


def owners(parameters: Sequence[Tensor], num_ranks: int) -> list[int]:
    """Choose the rank that updates each parameter: the largest first, to the rank that has least."""
    loads, found = [0] * num_ranks, [0] * len(parameters)
    for index in sorted(range(len(parameters)), key=lambda i: (-parameters[i].numel(), i)):
        found[index] = loads.index(min(loads))
        loads[found[index]] += parameters[index].numel()
    return found


class OptimizerShards:
    """Restricts an optimizer's step to the parameters that this rank owns, of which alone it keeps state.

    `gather` gathers an object of every rank on rank 0; the list is empty on the others.
    """

    def __init__(
        self, optimizer: Optimizer, rank: int, num_ranks: int, gather: Callable[[Any], list[Any]], strategy: str
    ) -> None:
        if type(optimizer) not in ELEMENTWISE:
            names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ConfigError(
                f"{strategy}: shard_optimizer=true updates each parameter on one rank alone, which is known to be "
                f"exact for {names}; got {type(optimizer).__name__}. Choose one of these, or set "
                "shard_optimizer=false."
            )
        self._optimizer, self._rank, self._gather = optimizer, rank, gather
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._owners = owners(self._parameters, num_ranks)
        self._others = [p for p, owner in zip(self._parameters, self._owners, strict=True) if owner != rank]
        self._hidden: list[Tensor | None] = []
        before_update(optimizer, self._hide)
        optimizer.register_step_post_hook(self._after_step)
        self.take_state()

    def take_state(self) -> None:
        """Forget the state of parameters that other ranks update."""
        for parameter in self._others:
            self._optimizer.state.pop(parameter, None)

    def whole_state(self) -> dict[str, Any]:
        """The optimizer's whole `state_dict` on rank 0, and this rank's part on the others; every rank must call it."""
        found = self._optimizer.state_dict()
        for indices in buckets(self._parameters, BUCKET_BYTES):  # as many at a time as a bucket holds
            own = {i: found["state"][i] for i in indices if self._owners[i] == self._rank and i in found["state"]}
            for part in self._gather(own):
                found["state"].update(part)
        found["state"] = dict(sorted(found["state"].items()))
        return found

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        """Send each rank's parameters to the others."""
        for parameter, gradient in zip(self._others, self._hidden, strict=True):
            parameter.grad = gradient
        self._hidden = []
        for rank in sorted({*self._owners}):
            tensors = [p for p, owner in zip(self._parameters, self._owners, strict=True) if owner == rank]
            broadcast_together(tensors, BUCKET_BYTES, rank)

    def _hide(self) -> None:
        """Hide the gradients of other ranks' parameters, after the closure has clipped and called hooks."""
        self._hidden = [parameter.grad for parameter in self._others]
        for parameter in self._others:
            parameter.grad = None
