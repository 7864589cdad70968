"""Run operations whose tensors are on several devices of a process, which torch refuses, on one of them.

Steps compute such between stages (a skip connection, a sum of losses), optimizers and hooks of a module that is on
several devices, and epoch-end hooks of what replicas have left in lists.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from .devices import to_device

_MIX = {
    Tensor.to, Tensor.copy_, Tensor.type_as, Tensor.set_, Tensor.backward, torch.autograd.backward, torch.autograd.grad,
    *(getattr(Tensor, name).__set__ for name in ("data", "grad")),
}  # fmt: skip
"""Take tensors of several devices as they are."""
_CPU_LENGTHS = {"lstm", "gru", "rnn_tanh", "rnn_relu", "_pack_padded_sequence", "_pad_packed_sequence"}
"""Take lengths that stay on the CPU."""
_JOINS = {"stack", "cat", "concat", "concatenate", "hstack", "vstack"}


class MixedDevices(TorchFunctionMode):
    """Runs operations on tensors of several devices on the last of these.

    Args:
        devices: called for the devices of what the calling thread runs, in order.
        move: copies a tensor to a device.
        stays: whether threads that work for this one are not in the mode.
    """

    def __init__(
        self,
        devices: Callable[[], Sequence[torch.device]],
        move: Callable[[Tensor, torch.device], Tensor] = to_device,
        stays: bool = False,
    ) -> None:
        super().__init__()
        self._devices, self._move, self.stays = devices, move, stays

    def begin(self) -> None:
        """Put this thread in the mode, until `end`; other modes may begin and end meanwhile."""
        overrides._push_mode(self)

    def end(self) -> None:
        """Take this thread out of the mode, and leave it in those that it has entered since."""
        since = list[TorchFunctionMode]()
        while self in overrides._get_current_function_mode_stack():
            since.append(overrides._pop_mode())
        for other in reversed(since[:-1]):
            overrides._push_mode(other)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or dict[str, Any]()
        first: torch.device | None = None
        for tensor in _tensors((*args, *kwargs.values()) if kwargs else args):
            device = tensor.device
            if first is None:
                first = device
            elif device != first and func not in _MIX and _name(func) not in _CPU_LENGTHS:
                args, kwargs = self._together(func, args, kwargs)
                break
        return func(*args, **kwargs)

    def _together(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        devices, joins = list(self._devices()), _name(func) in _JOINS

        def counts(tensor: Tensor) -> bool:  # a number on the CPU goes with all
            return tensor.device in devices and (joins or not tensor.is_cpu or tensor.dim() > 0)

        met = {tensor.device for tensor in _tensors((*args, *kwargs.values())) if counts(tensor)}
        if len(met) < 2:
            return args, kwargs
        target = max(met, key=lambda device: len(devices) - devices[::-1].index(device))
        written = kwargs.get("out", args[0] if _is_in_place(func) else None)
        if isinstance(written, Tensor):
            target = written.device

        def moved(tensor: Tensor) -> Tensor:
            return self._move(tensor, target) if counts(tensor) and tensor.device != target else tensor

        return tree_map_only(Tensor, moved, (args, kwargs))


def seen_by_others(values: Sequence[Any]) -> bool:
    """Whether other modes than that of mixed devices, or types of tensors, take part in a call with these values."""
    modes = overrides._get_current_function_mode_stack()
    own = [value for value in values if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter)]
    return any(not isinstance(mode, MixedDevices) for mode in modes) or overrides.has_torch_function(own)


def _tensors(values: Sequence[Any]) -> Generator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _is_in_place(func: Any) -> bool:
    name = _name(func)  # `__iadd__`; the others that begin so take one tensor
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
