"""A parameter that is gathered for a step, which a step may write to and ask for its gradient."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from ..core.errors import ConfigError
from .whole import shard_like

_DATA: Any = Tensor.data
_GRAD: Any = Tensor.grad


def verify_data(tensor: Tensor, value: Tensor) -> None:
    """Refuse values of another shape or dtype for what is cut over the ranks."""
    if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        raise ConfigError(
            f"fsdp: parameter.data has the shape {tuple(tensor.shape)} and is {tensor.dtype}, but was set to a tensor "
            f"of the shape {tuple(value.shape)}, which is {value.dtype}. A parameter that is cut over the ranks keeps "
            "both; change it in __init__ or configure_model."
        )


class Gathered(nn.Parameter):
    """A gathered parameter. What is written to it goes to its shard; outside of backward it has the shard's gradient.

    A write raises its version; one through `.data` does not, so that reading that counts as a write.
    """

    key: str
    """Its name in the module."""
    shard: nn.Parameter
    in_backward: bool
    """Whether torch adds and reduces gradients."""
    _touched: bool
    _seen: int

    @staticmethod
    def of(whole: Any, shard: nn.Parameter, name: str) -> "Gathered":
        """Make what torch has gathered from a shard such a parameter; hooks of the one's gradient are the other's."""
        hooks = OrderedDict[int, Any]() if shard._backward_hooks is None else shard._backward_hooks
        whole.__class__ = Gathered
        whole.key, whole.shard, whole.in_backward = name, shard, False
        whole._touched, whole._seen = False, whole._version
        shard._backward_hooks = whole._backward_hooks = hooks
        return whole

    @property
    def is_written(self) -> bool:
        """Whether it may have been written to, and has memory."""
        return (self._touched or self._version != self._seen) and self.untyped_storage().nbytes() > 0

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the shard what was written."""
        with torch._C.DisableTorchFunctionSubclass():
            shard = self.shard.detach()
            shard.copy_(shard_like(self.detach(), shard))
        self._touched, self._seen = False, self._version

    @property
    def own_grad(self) -> Tensor | None:
        """What a backward pass of this rank has added, until torch reduces it."""
        return _GRAD.__get__(self)

    @property
    def grad(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]  # as `data`
        """Its shard's gradient, but within backward this rank's own."""
        own = self.own_grad
        return self.shard.grad if own is None and not self.in_backward else own

    @grad.setter
    def grad(self, value: Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if not self.in_backward:
            self.shard.grad = value
            value = None
        _GRAD.__set__(self, value)

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  # an attribute, to torch's stubs
        """The values, which may be written to."""
        self._touched = True
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        verify_data(self, value)
        self.data.copy_(value)


class Kept(nn.Parameter):
    """A parameter from before its module was cut, which somebody may hold: it is what is in its place now."""

    owner: nn.Module
    key: str

    def now(self) -> Any:
        """This rank's shard, or within a step the whole where it is gathered."""
        return self.owner._parameters[self.key]

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Kept, Kept.now, (args, kwargs or {}))
        if func.__name__ == "__get__":
            return getattr(args[0], func.__self__.__name__)
        if func.__name__ == "__set__":
            return setattr(args[0], func.__self__.__name__, args[1])
        return func(*args, **kwargs)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.now(), memo)

    @override
    def __reduce_ex__(self, proto: Any) -> Any:
        return self.now().__reduce_ex__(proto)
