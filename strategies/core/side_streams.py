"""Copy tensors between GPUs beside their work: on streams of their own at both ends, ordered by events.

torch copies between two GPUs on the current stream of the source, after a barrier between the current streams of both,
so that the work of each waits for that of the other. Here only the copy waits for the source, and only what uses the
copy waits for it:

    source   work ── event ─────────── more work
                       └─ outgoing: copy ┐
    target   other work, meanwhile       └─ incoming: event ── work that uses the copy
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from lightning_fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence

from .devices import to_device
from .types import Batch

_STREAMS: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


def copies_beside(source: torch.device, target: torch.device) -> bool:
    """Whether copies from one device to another can run beside the work of both."""
    return source.type == target.type == "cuda" and source != target


def fills_beside(device: torch.device) -> bool:
    """Whether copies from the host to a device can run beside its work."""
    return device.type == "cuda" and torch.cuda.is_available()  # without one, in tests, it is a fake


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own: what others make of it (a fake without memory, say) moves in its own way."""
    return type(tensor) in (Tensor, Parameter)


def work_so_far(device: torch.device) -> torch.cuda.Event | None:
    """Mark the work that the current thread has queued on a device; None where nothing is queued."""
    return cast("torch.cuda.Event", torch.cuda.current_stream(device).record_event()) if device.type == "cuda" else None


def start_copy(tensors: Sequence[Tensor], device: torch.device, ready: torch.cuda.Event | None = None) -> list[Tensor]:
    """Start copying tensors of one device to another.

    Args:
        device: where they are copied to.
        ready: the event after which they hold their values; None for the work queued by this thread so far.

    Returns:
        The copies. Use them inside `on_incoming`, or after `finish_copy`.
    """
    if not tensors or not copies_beside(tensors[0].device, device):
        return [to_device(tensor, device) for tensor in tensors]
    source = tensors[0].device
    outgoing = _stream(source, "outgoing")
    ready = ready or work_so_far(source)
    assert ready is not None
    outgoing.wait_event(ready)
    with torch.cuda.stream(outgoing), torch.cuda.stream(_stream(device, "incoming")):
        copies = [to_device(tensor, device) for tensor in tensors]
    for tensor in tensors:
        tensor.record_stream(outgoing)  # its memory is not used again before the copy has been made
    return copies


def from_host(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to a device; tensors on the host are pinned and copied beside the device's work.

    The copy waits for nothing that is queued on the device. Launches return at once, so the next batch is on its way
    while the device computes this one.

    Args:
        device: where they are moved to.
    """
    if not fills_beside(device):
        return move_data_to_device(batch, device)
    current, incoming = torch.cuda.current_stream(device), _stream(device, "incoming")

    def copied(tensor: Any) -> Any:
        if (
            isinstance(tensor, PackedSequence)
            or not is_plain(tensor)
            or not tensor.is_cpu
            or tensor.layout is not torch.strided
        ):
            return tensor
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        with torch.cuda.stream(incoming):
            copy = to_device(pinned, device)
        copy.record_stream(current)  # it was allocated on the incoming stream
        return copy

    batch = apply_to_collection(batch, (Tensor, PackedSequence), copied, allow_frozen=True)
    current.wait_stream(incoming)
    return move_data_to_device(batch, device)


def arrival(device: torch.device) -> torch.cuda.Event | None:
    """Mark the copies from the host that were started so far; None where they are not made beside the device's work."""
    return cast("torch.cuda.Event", _stream(device, "incoming").record_event()) if fills_beside(device) else None


def on_incoming(source: torch.device, target: torch.device) -> AbstractContextManager[Any]:
    """Run what the block queues right after the copies from one device to another."""
    return torch.cuda.stream(_stream(target, "incoming")) if copies_beside(source, target) else nullcontext()


def finish_copy(copies: Sequence[Tensor], source: torch.device, stream: torch.cuda.Stream | None = None) -> None:
    """Make the work that follows on the copies' device wait for them.

    Args:
        copies: what `start_copy` returned, or what was computed of it inside `on_incoming`.
        source: the device that they came from.
        stream: whose work follows; None for the current stream.
    """
    if not copies or not copies_beside(source, copies[0].device):
        return
    device = copies[0].device
    stream = stream or torch.cuda.current_stream(device)
    stream.wait_stream(_stream(device, "incoming"))
    for copy in copies:
        copy.record_stream(stream)  # the copies were allocated on the incoming stream


def _stream(device: torch.device, name: str) -> torch.cuda.Stream:
    if (device, name) not in _STREAMS:
        _STREAMS[device, name] = torch.cuda.Stream(device)
    return _STREAMS[device, name]


def cross(tensors: Sequence[Tensor], device: torch.device, ready: torch.cuda.Event | None = None) -> list[Tensor]:
    """Move tensors of one device to another, and their gradients back, beside the work of both where that is possible.

    Args:
        device: where they are moved to.
        ready: the event after which they hold their values; None for the work queued by this thread so far.
    """
    if not tensors or not copies_beside(tensors[0].device, device) or not all(map(is_plain, tensors)):
        return [to_device(tensor, device) for tensor in tensors]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(_Crossing.apply(device, ready, *tensors))
    copies = start_copy(tensors, device, ready)
    finish_copy(copies, tensors[0].device)
    return copies


class _Crossing(torch.autograd.Function):
    """Moves tensors forward and their gradients backward, each on side streams."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, ready: torch.cuda.Event | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.source = tensors[0].device
        ctx.stream = torch.cuda.current_stream(ctx.source)  # backward runs in another thread, with streams of its own
        copies = start_copy(tensors, device, ready)
        finish_copy(copies, ctx.source)
        needed = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(*(copy for copy, has_grad in zip(copies, needed, strict=True) if not has_grad))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [grad for grad in grads if grad is not None]
        moved = start_copy(given, ctx.source)
        if given:
            finish_copy(moved, given[0].device, ctx.stream)
        back = iter(moved)
        return (None, None, *(None if grad is None else next(back) for grad in grads))
