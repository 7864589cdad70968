"""Tell which parameters may have been written without a trace.

A write to a tensor, or to a view of it, raises the tensor's version; a write through `parameter.data` does not, nor one
through what others hold of the tensor's memory (an array, a view taken from `.data`). Moving averages are often written
so. Here a parameter counts as written if its `.data` was read or set, or if its memory is shared.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_DATA: Any = torch.Tensor.data
_USES_OF_OWN = 2
"""A tensor's own use of its storage, and that of the object that asks."""

_watches: weakref.WeakSet["HiddenWrites"] = weakref.WeakSet()


class HiddenWrites:
    """Watches parameters, which somebody keeps alive, from construction on, until it is closed or not referenced."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._numbers = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._touched: set[int] = set()
        _watches.add(self)
        nn.Parameter.data = property(_read, _write)  # pyright: ignore[reportAttributeAccessIssue]  # torch has no hook for it

    def take(self) -> set[int]:
        """The indices of the parameters whose `.data` was read or set since the last call."""
        touched, self._touched = self._touched, set()
        return touched

    def note(self, parameter: Tensor) -> None:
        """Note that a parameter's `.data` is read or set."""
        number = self._numbers.get(id(parameter))
        if number is not None:
            self._touched.add(number)

    def close(self) -> None:
        """End watching."""
        _watches.discard(self)
        if not _watches and "data" in vars(nn.Parameter):
            del nn.Parameter.data


def is_shared(tensor: Tensor) -> bool:
    """Whether anything else holds the memory of a tensor."""
    try:
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > _USES_OF_OWN
    except (AttributeError, NotImplementedError, RuntimeError):  # a layout or a version of torch without such a count
        return True


def _read(parameter: Tensor) -> Tensor:
    for watch in tuple(_watches):
        watch.note(parameter)
    return _DATA.__get__(parameter)


def _write(parameter: Tensor, value: Tensor) -> None:
    for watch in tuple(_watches):
        watch.note(parameter)
    _DATA.__set__(parameter, value)
