"""Call the hooks that users register on parameters with the gradients of all replicas.

register_hook                        what a backward pass adds     to the gradients of the root
register_post_accumulate_grad_hook   what is accumulated
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.private import of_torch

_Hooks: TypeAlias = dict[int, Callable[[Tensor], Any]]

_TAKING = -1
"""The number, among the hooks of a parameter, of what takes the gradients of parts."""


class AccumulatedHooks:
    """Holds back the hooks of the root's parameters until its gradients are summed.

    The root is a replica itself: its backward pass would call them with the gradients of its chunk. Each leaves
    something in its place, so that a step may remove it.

    Args:
        parameters: of the root.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._held: list[tuple[_Hooks, _Hooks]] = []
        self._accumulated: list[tuple[Tensor, _Hooks]] = []
        self._added: list[tuple[Tensor, _Hooks, list[Tensor]]] = []

    def hold(self) -> None:
        """Have no backward pass call them, until `restore`."""
        taken = {id(parameter): parts for parameter, _, parts in self._added}
        self.restore()
        for parameter in self._parameters:
            if hooks := of_torch.post_accumulate_grad_hooks(parameter):
                self._accumulated.append((parameter, hooks))
                self._leave_places(hooks)
            if hooks := of_torch.backward_hooks(parameter):
                parts = taken.get(id(parameter), [])
                self._added.append((parameter, hooks, parts))
                self._leave_places(hooks)
                hooks[_TAKING] = partial(_take, parts)

    def _leave_places(self, hooks: _Hooks) -> None:
        self._held.append((hooks, dict(hooks)))
        for number in hooks:
            hooks[number] = _nothing

    def restore(self) -> None:
        """Have backward passes call them again, but for those that were removed."""
        for hooks, kept in self._held:
            hooks.pop(_TAKING, None)
            hooks.update({number: hook for number, hook in kept.items() if number in hooks})
        self._held.clear()
        self._accumulated.clear()
        self._added.clear()

    def call(self) -> None:
        """Call those that were held back, for the parameters that have a gradient."""
        accumulated, added = list(self._accumulated), list(self._added)
        self.restore()
        with torch.no_grad():  # as in a backward pass
            for parameter, hooks, parts in added:
                if parts:
                    _add(parameter, hooks, parts)
            for parameter, hooks in accumulated:
                for hook in tuple(hooks.values()):
                    if parameter.grad is not None:
                        hook(parameter)


def _nothing(tensor: Tensor) -> None:
    """Stand in the place of a hook."""


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
