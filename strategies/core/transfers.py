"""Copy tensors between accelerators beside their work: on streams of their own at both ends, ordered by events.

source   work ── event ─────────── more work
                   └─ outgoing: copy ┐
target   other work, meanwhile       └─ incoming: event ── work that uses the copy
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning_fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn, overrides
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from .devices import has_streams, to_device
from .types import Batch

_STREAMS: dict[tuple[torch.device, str], torch.Stream] = {}


def _copies_beside(tensors: Sequence[Tensor], target: torch.device) -> bool:
    """Whether copies of tensors of one device to another can run beside the work of both."""
    source = tensors[0].device if tensors else target
    return source.type == target.type and source != target and has_streams(source)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own: what others make of it (a fake without memory, say) moves in its own way."""
    return type(tensor) in (Tensor, Parameter)


def work_so_far(device: torch.device) -> torch.Event | None:
    """Mark the work that the current thread has queued on a device; None where nothing is queued."""
    return torch.accelerator.current_stream(device).record_event() if has_streams(device) else None


def start_copy(
    tensors: Sequence[Tensor], device: torch.device, ready: torch.Event | None = None
) -> tuple[list[Tensor], torch.Event | None]:
    """Start copying tensors, `ready` after an event, to a device; the copies and an event are for `finish_copy`."""
    if not _copies_beside(tensors, device):
        return [to_device(tensor, device) for tensor in tensors], None
    source = tensors[0].device
    outgoing, incoming = _stream(source, f"to {device}"), _stream(device, f"from {source}")
    ready = ready or work_so_far(source)
    assert ready is not None
    outgoing.wait_event(ready)
    with outgoing, incoming:
        copies = [to_device(tensor, device) for tensor in tensors]
    _record(tensors, outgoing)  # their memory is not used again before the copies have been made
    return copies, incoming.record_event()


def from_host(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to a device; tensors on the host are pinned and copied while the device computes the last one."""
    if not has_streams(device):
        return move_data_to_device(batch, device)
    current, incoming = torch.accelerator.current_stream(device), _stream(device, "from the host")

    def copied(tensor: Any) -> Any:
        if not (is_plain(tensor) and tensor.is_cpu and tensor.layout is torch.strided):  # a PackedSequence isn't
            return tensor
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        with incoming:
            copy = to_device(pinned, device)
        copy.record_stream(current)  # it was allocated on the incoming stream
        return copy

    batch = apply_to_collection(batch, (Tensor, PackedSequence), copied, allow_frozen=True)
    current.wait_stream(incoming)
    return move_data_to_device(batch, device)


def arrival(device: torch.device) -> torch.Event | None:
    """Mark the copies from the host that were started so far; None where they are not made beside the device's work."""
    return _stream(device, "from the host").record_event() if has_streams(device) else None


def beside(device: torch.device) -> AbstractContextManager[Any]:
    """Run what the block queues beside a device's work, if it has streams: what uses it comes after `finish_beside`."""
    return _stream(device, "beside") if has_streams(device) else nullcontext()


def finish_beside(tensors: Sequence[Tensor]) -> None:
    """Make the work that follows on the tensors' device wait for what was queued inside `beside`."""
    device = tensors[0].device
    finish_copy(tensors, _stream(device, "beside").record_event() if has_streams(device) else None)


def finish_copy(copies: Sequence[Tensor], arrived: torch.Event | None, stream: torch.Stream | None = None) -> None:
    """Make the work that follows on a stream, or the current one, wait for what `start_copy` returned."""
    if arrived is None:
        return
    stream = stream or torch.accelerator.current_stream(copies[0].device)
    stream.wait_event(arrived)
    _record(copies, stream)  # they were allocated on another


def _record(tensors: Sequence[Tensor], stream: torch.Stream) -> None:
    """Keep the memory of tensors until a stream has done what is queued on it; a sparse one has two pieces."""
    for tensor in tensors:
        for piece in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
            piece.record_stream(stream)


def _stream(device: torch.device, name: str) -> torch.Stream:
    if (device, name) not in _STREAMS:
        _STREAMS[device, name] = torch.Stream(device)
    return _STREAMS[device, name]


def cross(
    tensors: Sequence[Tensor], device: torch.device, ready: torch.Event | None = None
) -> tuple[list[Tensor], Callable[[], None]]:
    """Start moving tensors, as `start_copy` does, and their gradients back; returns them, and what waits for them."""
    if not _copies_beside(tensors, device) or not all(map(is_plain, tensors)):
        return [to_device(tensor, device) for tensor in tensors], lambda: None
    arrivals: list[torch.Event | None] = []
    copies = list(_Crossing.apply(device, ready, arrivals, *tensors))
    return copies, partial(finish_copy, copies, arrivals[0])


class _Crossing(torch.autograd.Function):
    """Moves tensors forward and their gradients backward, each on side streams."""

    @staticmethod
    def forward(
        ctx: Any, device: torch.device, ready: torch.Event | None, arrivals: list[torch.Event | None], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.source = tensors[0].device
        ctx.stream = torch.accelerator.current_stream(ctx.source)  # backward has another thread, and its streams
        copies, arrived = start_copy(tensors, device, ready)
        arrivals.append(arrived)
        needed = ctx.needs_input_grad[3:]
        ctx.mark_non_differentiable(*(copy for copy, has_grad in zip(copies, needed, strict=True) if not has_grad))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [grad for grad in grads if grad is not None]
        moved, arrived = start_copy(given, ctx.source)
        finish_copy(moved, arrived, ctx.stream)
        back = iter(moved)
        return (None, None, None, *(None if grad is None else next(back) for grad in grads))


_MIX = {
    Tensor.to, Tensor.copy_, Tensor.type_as, Tensor.set_, Tensor.backward, torch.autograd.backward, torch.autograd.grad,
    *(getattr(Tensor, name).__set__ for name in ("data", "grad")),
}  # fmt: skip
"""Take tensors of several devices as they are."""
_CPU_LENGTHS = {"lstm", "gru", "rnn_tanh", "rnn_relu", "_pack_padded_sequence", "_pad_packed_sequence"}
"""Take lengths that stay on the CPU."""
_JOINS = {"stack", "cat", "concat", "concatenate", "hstack", "vstack"}


class MixedDevices(TorchFunctionMode):
    """Runs operations on tensors of several devices on the last of these; in threads, too, unless it `stays`."""

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
