"""Tell what code has changed on a module: attributes by identity, hooks by their numbers."""

from collections.abc import Sequence
from numbers import Number
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..core.patching import HOOKS

_hooks_in = itemgetter(*HOOKS)


class Seen:
    """What a module of the root held when it was last copied, and after the step that followed."""

    def __init__(self, module: nn.Module) -> None:
        self.refresh(module)

    def refresh(self, module: nn.Module) -> None:
        """Note that the copies are as the module is."""
        self._copied = self._left = module.__dict__.copy()
        self._copied_hooks = self._left_hooks = hook_numbers(module)

    def note_step(self, module: nn.Module) -> None:
        """Note how a step has left the module."""
        if not _are_same_dicts(module.__dict__, self._left):
            self._left = module.__dict__.copy()
        self._left_hooks = hook_numbers(module)

    def is_current(self, module: nn.Module) -> bool:
        """Whether neither a step nor anything else has changed the module since it was copied."""
        return self._copied_hooks == hook_numbers(module) and _are_same_dicts(self._copied, module.__dict__)

    def changed(self, module: nn.Module, own_step: bool) -> list[str]:
        """The attributes to copy; with `own_step` the copy ran the step, too, and keeps the objects that it made."""
        now = module.__dict__
        later = changed_keys(self._left, now)
        in_step = changed_keys(self._copied, self._left)
        return later + [key for key in in_step if key not in later and not (own_step and not is_plain(now.get(key)))]

    def hooks(self, with_step: bool) -> Sequence[Sequence[int]]:
        """The hooks that a copy has; with `with_step` it did not run the step that changed them on the root."""
        return self._copied_hooks if with_step else self._left_hooks


def _are_same_dicts(values: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether two dictionaries hold the same objects: of two lists that are equal now, each goes its own way."""
    return values.keys() == others.keys() and all(map(is_, values.values(), others.values()))


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    missing = object()
    changed = [key for key, value in now.items() if value is not before.get(key, missing)]
    return changed + [key for key in before if key not in now]


def hook_numbers(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """The numbers of a module's hooks, which torch gives out once, in their order."""
    return tuple(map(tuple, _hooks_in(module.__dict__)))


def is_plain(value: Any) -> bool:
    """Whether a value can't be written to by those who hold it, or is a tensor."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, (str, bytes, Number, Tensor, torch.device, torch.dtype, type(None)))
