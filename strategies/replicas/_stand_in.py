"""Do to the root what a step does to the replica that runs the first chunk in its place."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..core.patching import HOOKS, hooks_of
from ._module_copy import ModuleCopy
from ._seen import changed_keys, hook_numbers, is_plain

_OWN = ("_device", "_parameters", "_buffers", "_modules", *HOOKS)
"""Attributes that every replica has of its own."""


class StandIn:
    """The replica of the first chunk in a step in which the root has no samples.

    Args:
        copy: the replica, before the step.
        root_device: where the root takes tensors over.
    """

    def __init__(self, copy: ModuleCopy, root_device: torch.device) -> None:
        self._copy = copy
        self._root_device = root_device
        self._before = [(root, module, module.__dict__.copy(), hook_numbers(module)) for root, module in copy.pairs]

    def return_hooks(self, first: int, taken: list[tuple[Tensor, Tensor, list[dict[int, Any]]]]) -> bool:
        """Register on the root the hooks that the step registered; whoever has a handle removes them from both.

        Args:
            first: the lowest number that they can have.
            taken: each parameter of the root, that of the replica, and the hooks that the step registered on this.

        Returns:
            Whether there are any.
        """
        roots: dict[int, Any] = {}
        """The dictionaries of the root by the id of the replica's."""
        found = False
        for root, module in self._copy.pairs:
            for key in HOOKS:
                hooks, own = root.__dict__[key], module.__dict__[key]
                added = {number: self._copy.returned(hook) for number, hook in own.items() if number >= first}
                hooks.update(added)
                found = found or bool(added)
                roots[id(own)] = hooks
        for root, parameter, hooks in taken:
            registers = (root.register_hook, root.register_post_accumulate_grad_hook)
            for kind, register in zip(hooks, registers, strict=True):
                for number, hook in kind.items():
                    _renumber(register(self._copy.returned(hook)), number)
            found = found or any(hooks)
            roots |= {id(own): hooks for own, hooks in zip(hooks_of(parameter), hooks_of(root), strict=True)}
        for _, module in self._copy.pairs if found else ():
            for handle in _handles(list(module.__dict__.values())):
                if handle.id >= first:
                    _extend(handle, roots)
        return found

    def hand_over(self, everything: bool) -> None:
        """Set on the root what the step set, and remove from it the hooks that the step removed.

        Args:
            everything: also objects, which may say that there are hooks, or hold handles; else numbers, strings and
                tensors only.
        """
        for root, module, before, hooks in self._before:
            for key in changed_keys(before, module.__dict__):
                if key in _OWN:
                    continue
                value = module.__dict__.get(key)
                if key not in module.__dict__:
                    root.__dict__.pop(key, None)
                elif is_plain(value):
                    root.__dict__[key] = value.detach().to(self._root_device) if isinstance(value, Tensor) else value
                elif everything:
                    root.__dict__[key] = self._copy.returned(value)
            for key, numbers in zip(HOOKS, hooks, strict=True):
                for number in set(numbers) - module.__dict__[key].keys():
                    root.__dict__[key].pop(number, None)


def _handles(value: Any) -> Iterator[RemovableHandle]:
    """The handles of hooks in a value."""
    if isinstance(value, RemovableHandle):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _handles(item)


def _extend(handle: RemovableHandle, roots: dict[int, Any]) -> None:
    """Have a handle of a replica's hook remove the root's, too."""
    own = [handle.hooks_dict_ref(), *(extra() for extra in handle.extra_dict_ref)]
    others = [roots[id(hooks)] for hooks in own if id(hooks) in roots]
    handle.extra_dict_ref = (*handle.extra_dict_ref, *map(weakref.ref, others))


def _renumber(handle: RemovableHandle, number: int) -> None:
    """Give a hook that was registered just now another number."""
    hooks = handle.hooks_dict_ref()
    assert hooks is not None
    hooks[number] = hooks.pop(handle.id)
