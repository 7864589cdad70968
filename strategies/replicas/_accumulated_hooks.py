"""Call the hooks that see accumulated gradients (`register_post_accumulate_grad_hook`) with those of all replicas."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.private import of_torch


class AccumulatedHooks:
    """Holds back the hooks of the root's parameters until its gradients are summed.

    The root is a replica itself: its backward pass would call them with the gradients of its chunk.

    Args:
        parameters: of the root.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._held: list[tuple[Tensor, dict[Any, Callable[[Tensor], None]], dict[Any, Callable[[Tensor], None]]]] = []

    def hold(self) -> None:
        """Have no backward pass call them, until `restore`."""
        self.restore()
        for parameter in self._parameters:
            if hooks := of_torch.post_accumulate_grad_hooks(parameter):
                self._held.append((parameter, hooks, dict(hooks)))
                hooks.clear()  # torch keeps this dict: to set None instead has no effect

    def restore(self) -> None:
        """Have backward passes call them again."""
        for _, hooks, kept in self._held:
            later = dict(hooks)
            hooks.clear()
            hooks.update(kept | later)
        self._held.clear()

    def call(self) -> None:
        """Call those that were held back, for the parameters that have a gradient."""
        held = list(self._held)
        self.restore()
        with torch.no_grad():  # as in a backward pass
            for parameter, _, kept in held:
                for hook in kept.values():
                    if parameter.grad is not None:
                        hook(parameter)
