"""Keep the hooks of parameters on the root alone, which gives them the gradients of all replicas."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from ..core.private import of_torch

TakenHooks: TypeAlias = list[dict[int, Any]]
"""Hooks by their numbers: those that see a gradient, and those that see what is accumulated."""


def hooks_of(parameter: Tensor) -> TakenHooks:
    """The hooks of a parameter, in the dictionaries to which their handles refer."""
    found = [of_torch.backward_hooks(parameter), of_torch.post_accumulate_grad_hooks(parameter)]
    return [{} if hooks is None else hooks for hooks in found]


def take_hooks(parameter: Tensor, first: int) -> TakenHooks:
    """Take the hooks with numbers from `first` on from a replica's parameter."""
    return [{n: hooks.pop(n) for n in list(hooks) if n >= first} for hooks in hooks_of(parameter)]


def give_hooks(parameter: Tensor, taken: Sequence[dict[int, Any]]) -> None:
    """Register hooks on a parameter of the root, with the numbers that they have."""
    registers = (parameter.register_hook, parameter.register_post_accumulate_grad_hook)
    for hooks, register in zip(taken, registers, strict=True):
        for number, hook in hooks.items():
            handle = register(hook)
            own = handle.hooks_dict_ref()
            assert own is not None
            own[number] = own.pop(handle.id)
