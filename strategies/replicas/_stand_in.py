"""Do to the root what a step does to the replica that runs the first chunk in its place."""

from collections.abc import Iterator, Sequence, Set
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ._module_copy import HOOKS, ModuleCopy
from ._seen import changed_keys, hook_numbers, is_plain

_Entry: TypeAlias = tuple[nn.Module, nn.Module, dict[str, Any], tuple[tuple[int, ...], ...]]
"""A module of the root, the one that runs in its place, and the attributes and hooks of that before the step."""

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
        self._before: list[_Entry] = [
            (root, module, module.__dict__.copy(), hook_numbers(module)) for root, module in copy.pairs
        ]

    def hand_over(self) -> None:
        """Set and register on the root what the step set and registered."""
        if self._keeps_handle():
            self._return_hooks()
            return
        # what a step sets first when it registers hooks may say that it has, and the root has none of them
        adds_hooks = any(any(_added(leader, hooks)) for _, leader, _, hooks in self._before)
        for entry in self._before:
            self._take_over(entry, entry[2].keys() | (set() if adds_hooks else entry[1].__dict__.keys()))

    def _keeps_handle(self) -> bool:
        """Whether the step of the first chunk's replica has set an attribute to the handle of a hook that is there."""
        added = {number for _, leader, _, hooks in self._before for own in _added(leader, hooks) for number in own}
        kept = (
            leader.__dict__.get(key)
            for _, leader, before, _ in (self._before if added else [])
            for key in changed_keys(before, leader.__dict__)
        )
        return any(handle.id in added for value in kept for handle in _handles(value))

    def _return_hooks(self) -> None:
        """Give the root the hooks that the step registered on another replica, and all that it set.

        Whoever removes a hook between steps does so by the root's handle.
        """
        for entry in self._before:
            module, leader, before, hooks = entry
            for key in changed_keys(before, leader.__dict__):
                if key in _OWN:
                    continue
                if key in leader.__dict__:
                    module.__dict__[key] = self._copy.returned(leader.__dict__[key])
                else:
                    module.__dict__.pop(key, None)
            self._take_over(entry, set())
            for key, added in zip(HOOKS, _added(leader, hooks), strict=True):
                own = leader.__dict__[key]
                module.__dict__[key].update({number: self._copy.returned(own[number]) for number in added})

    def _take_over(self, entry: _Entry, known: Set[str]) -> None:
        """Do to a module of the root what a step did to another replica's: known plain values set, hooks removed."""
        module, leader, before, hooks = entry
        for key in changed_keys(before, leader.__dict__):
            if key in known and is_plain(value := leader.__dict__.get(key)) and key not in _OWN:
                module.__dict__[key] = value.detach().to(self._root_device) if isinstance(value, Tensor) else value
        for key, numbers in zip(HOOKS, hooks, strict=True):
            for number in set(numbers) - leader.__dict__[key].keys():
                module.__dict__[key].pop(number, None)


def _added(module: nn.Module, before: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each of `HOOKS` the numbers of the hooks that a module was given."""
    return [
        [number for number in module.__dict__[key] if number not in known]
        for key, known in zip(HOOKS, before, strict=True)
    ]


def _handles(value: Any) -> Iterator[RemovableHandle]:
    """The handles of hooks in a value."""
    if isinstance(value, RemovableHandle):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _handles(item)
