"""Call the hooks that users register on parameters with the gradients of all replicas.

register_hook                        what a backward pass adds     to the gradients of the root
register_post_accumulate_grad_hook   what is accumulated
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.private import of_torch

_Hooks = dict[Any, Callable[[Tensor], Any]]


class AccumulatedHooks:
    """Holds back the hooks of the root's parameters until its gradients are summed.

    The root is a replica itself: its backward pass would call them with the gradients of its chunk.

    Args:
        parameters: of the root.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._held: list[tuple[Tensor, _Hooks, _Hooks]] = []
        self._added: list[tuple[Tensor, _Hooks, _Hooks, list[Tensor]]] = []

    def hold(self) -> None:
        """Have no backward pass call them, until `restore`."""
        taken = {id(parameter): parts for parameter, _, _, parts in self._added}
        self.restore()
        for parameter in self._parameters:
            if hooks := of_torch.post_accumulate_grad_hooks(parameter):
                self._held.append((parameter, hooks, dict(hooks)))
                hooks.clear()  # torch keeps this dict: to set None instead has no effect
            if hooks := of_torch.backward_hooks(parameter):
                parts = taken.get(id(parameter), [])
                self._added.append((parameter, hooks, dict(hooks), parts))
                hooks.clear()
                hooks[_TAKING] = partial(_take, parts)

    def restore(self) -> None:
        """Have backward passes call them again."""
        for _, hooks, kept in (*self._held, *(entry[:3] for entry in self._added)):
            later = dict(hooks)
            later.pop(_TAKING, None)
            hooks.clear()
            hooks.update(kept | later)
        self._held.clear()
        self._added.clear()

    def call(self) -> None:
        """Call those that were held back, for the parameters that have a gradient."""
        held, added = list(self._held), list(self._added)
        self.restore()
        with torch.no_grad():  # as in a backward pass
            for parameter, hooks, _, parts in added:
                if parts:
                    _add(parameter, hooks, parts)
            for parameter, _, kept in held:
                for hook in kept.values():
                    if parameter.grad is not None:
                        hook(parameter)


_TAKING = "taking"
"""The key, among the hooks of a parameter, of what takes the gradients of parts."""


def _take(parts: list[Tensor], gradient: Tensor) -> Tensor:
    """Take the gradient of a part of the batch, and leave zeros."""
    if parts:
        parts[0] = parts[0] + gradient
    else:
        parts.append(gradient)
    return torch.zeros_like(gradient)


def _add(parameter: Tensor, hooks: _Hooks, parts: Sequence[Tensor]) -> None:
    """Add to a parameter's gradient, which has zeros for it, what its hooks make of the sum of all parts."""
    gradient = parts[0]
    for hook in tuple(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    assert parameter.grad is not None
    parameter.grad = parameter.grad + gradient
