"""See whether a step mixes samples of its batch in values that need no gradient, which no graph of autograd shows.

    x.flip(0), x[order], x - x.mean(0), y[order]    and what is computed of them meets what is trained

Only operations on tensors of the batch, and on what was computed of them, are looked at.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...core.private import of_torch

_KEEPING = {"cat", "stack", "squeeze", "unsqueeze", "expand", "unflatten"}
"""Operations with dimensions that leave samples apart."""
_MOVING = {"t", "transpose", "permute"}
"""Operations after which another dimension than the first may be that of samples."""
_TAKING = {"select", "slice", "split", "split_with_sizes", "unbind"}
"""Operations that take some samples, often each of them in turn."""
_PRODUCTS = {"mm", "addmm", "_cdist_forward"}


class _Flow(IntEnum):
    """What the values of a tensor were computed of."""

    OTHERS, SAMPLES, MAYBE_MIXED, MIXED = range(4)


class DataFlow(of_torch.TorchDispatchMode):
    """Follows the tensors of a batch through the operations of a step, inside the block.

    Args:
        tensors: the batch's.
        num: its samples.

    Attributes:
        mixed_by: the operation that mixes samples; empty if none does for certain.
        may_mix: whether something may do so: an operation on another dimension of as many elements, once dimensions
            were moved, or a number that the program reads of the batch, and not of what the module computed of it.
    """

    def __init__(self, tensors: Iterable[Tensor], num: int) -> None:
        super().__init__()
        self._num = num
        self._flows: dict[Any, _Flow] = {}
        self._computed = set[Any]()
        """Storages of what was computed of trained parameters, such as losses and predictions."""
        self._storages = list[Any]()
        """References that keep the numbers of storages, not their memory, from being used again."""
        self._name = self.mixed_by = ""
        self.may_mix = self._has_moved = False
        for tensor in tensors:
            self._mark(tensor, _Flow.SAMPLES)

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True  # or torch would leave out what is compiled, here and later

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with suppress(RuntimeError):  # a tensor without a storage
            self._follow(func, args, kwargs or {}, result)
        return result

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        read = _tensors((args, kwargs))
        flow = max(map(self._flow, read), default=_Flow.OTHERS)
        if flow is _Flow.OTHERS:
            return
        is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read)
        is_computed = is_trained or not self._computed.isdisjoint(map(_storage, filter(_has_storage, read)))
        if func is of_torch.local_scalar_dense.default:
            self.may_mix |= read[0].is_floating_point() and not is_computed
        elif is_trained:
            named = self._flow(args[0]) is not _Flow.OTHERS and self._mixes(func, args, kwargs, result)
            self.may_mix |= _Flow.MAYBE_MIXED in (flow, named)
            self.mixed_by = self.mixed_by or (self._name if flow is _Flow.MIXED else "")
        elif self._flow(args[0]) is not _Flow.OTHERS:
            mixes = self._mixes(func, args, kwargs, result)
            self._name = self._name or (func.overloadpacket.__name__ if mixes is _Flow.MIXED else "")
            flow = max(flow, mixes)
        for tensor in _tensors(result):
            self._mark(tensor, flow)
            if is_computed and _has_storage(tensor):
                self._computed.add(_storage(tensor))

    def _mixes(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> _Flow:
        """Tell what an operation on values of the batch makes of samples."""
        values, name = args[0], func.overloadpacket.__name__
        if name in _MOVING:
            self._has_moved = True
        if name in _KEEPING | _MOVING or not values.dim():
            return _Flow.SAMPLES
        if name in _PRODUCTS:
            factors = [self._flow(factor) for factor in args if isinstance(factor, Tensor)][-2:]
            return _Flow.MIXED if _Flow.OTHERS not in factors else _Flow.SAMPLES
        if name == "index":
            dims = [dim for dim, index in enumerate(args[1]) if index is not None]
            is_certain = bool(dims) and args[1][dims[0]].dtype not in (torch.bool, torch.uint8)
        else:
            dims, is_certain = _dims(func, args, kwargs), name not in _TAKING
        if dims is None:
            reduced = isinstance(result, Tensor) and not result.dim() and values.numel() > 1
            return _Flow.MIXED if reduced or name == "roll" else _Flow.SAMPLES
        if isinstance(result, Tensor) and name == "slice" and result.shape == values.shape:
            return _Flow.SAMPLES
        if 0 in dims and len(values) > 1 and not len(values) % self._num:
            return _Flow.MIXED if is_certain else _Flow.MAYBE_MIXED
        along = self._has_moved and any(values.shape[dim] == self._num for dim in dims)
        return _Flow.MAYBE_MIXED if along else _Flow.SAMPLES

    def _flow(self, tensor: Any) -> _Flow:
        if not isinstance(tensor, Tensor) or not _has_storage(tensor):
            return _Flow.OTHERS
        return max(self._flows.get(key, _Flow.OTHERS) for key in _keys(tensor))

    def _mark(self, tensor: Tensor, flow: _Flow) -> None:
        if _has_storage(tensor):
            whole, view = _keys(tensor)
            key = view if whole in self._flows and flow is _Flow.MAYBE_MIXED else whole  # some samples of a tensor
            self._flows[key] = max(flow, self._flow(tensor))
            self._storages.append(of_torch.StorageWeakRef(tensor.untyped_storage()))


def _keys(tensor: Tensor) -> tuple[Any, Any]:
    """What identifies the storage of a tensor, and the part of it that the tensor shows."""
    storage = _storage(tensor)
    return storage, (storage, tensor.storage_offset(), tuple(tensor.shape))


def _storage(tensor: Tensor) -> Any:
    return of_torch.cdata(tensor.untyped_storage())


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in of_torch.tree_leaves(values) if isinstance(value, Tensor)]


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _dims(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int] | None:
    """The dimensions along which an operation works; None if it was given none, which often means all of them."""
    for i, argument in enumerate(of_torch.schema(func).arguments):
        if argument.name in ("dim", "dims"):
            given = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            dims = [given] if isinstance(given, int) else list(given or ())
            return [dim % args[0].dim() for dim in dims] or None
    return None
