"""Sum the replicas' gradients on the root device."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..core.devices import buckets, flattened, is_accelerator, move_coalesced, unflattened
from ..core.private import of_torch
from ..core.side_streams import finish_copy, on_incoming, start_copy, work_so_far

BUCKET_BYTES = 2**25
"""Bytes of gradients moved to the root in one transfer."""


@dataclass(frozen=True)
class _Bucket:
    """Gradients of one replica, one after the other, and when its device has computed them."""

    parameters: list[int]
    flat: Tensor
    shapes: list[torch.Size]
    ready: torch.cuda.Event | None


class GradientSum:
    """Sums the replicas' gradients onto the root's parameters after each backward.

    A replica on another accelerator sends its gradients in buckets during its backward. On the root each bucket is
    added, at once, to one running sum, so that the root holds its own gradients, the sum and one bucket, whatever the
    number of replicas. The buckets take turns, so that the order of additions is the same in every run:

        first bucket of replica 1, 2, ..., second bucket of replica 1, 2, ...

    The gradients of other replicas, sparse ones, and those that a hook of the root's parameter must see are added, one
    bucket at a time, when backward has finished. The replicas keep no gradients.

    Args:
        replicas: the parameters of each other replica, in the order of the root's.
        overlap: send during backward; None decides by the devices.
        bucket_bytes: bytes per transfer.
    """

    def __init__(
        self,
        root: Sequence[Tensor],
        replicas: Sequence[Sequence[Tensor]],
        overlap: bool | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._root = list(root)
        self._device = root[0].device if root else torch.device("cpu")
        self._replicas = [list(parameters) for parameters in replicas]
        self._bucket_bytes = bucket_bytes
        self._sums: dict[int, Tensor] = {}
        self._turn = 0
        self._lock = threading.Lock()
        senders = [_Sender(self._root, parameters, bucket_bytes) for parameters in self._replicas]
        self._senders = [s for s in senders if (s.sends_beside(self._device) if overlap is None else overlap)]
        self._waiting: list[deque[_Bucket]] = [deque() for _ in self._senders]
        for queue, sender in zip(self._waiting, self._senders, strict=True):
            sender.attach(partial(self._receive, queue))

    def collect(self) -> None:
        """Add every replica's gradients to the root's."""
        with torch.no_grad():
            for sender in self._senders:
                sender.flush()
            for queue in self._waiting:  # for the turns of replicas that have sent less, or had no samples
                while queue:
                    self._add_to_sums(queue.popleft())
            sums, self._sums, self._turn = self._sums, {}, 0
            if sums:
                finish_copy(list(sums.values()), self._senders[0].device)
                self._add(list(sums), list(sums.values()))
            for parameters in self._replicas:
                self._add_rest(parameters)

    def remove_hooks(self) -> None:
        """Remove the hooks from the replicas' parameters."""
        for sender in self._senders:
            sender.remove_hooks()

    def _receive(self, queue: deque[_Bucket], bucket: _Bucket) -> None:
        with self._lock, torch.no_grad():
            queue.append(bucket)
            while due := self._waiting[self._turn % len(self._waiting)]:
                self._turn += 1
                self._add_to_sums(due.popleft())

    def _add_to_sums(self, bucket: _Bucket) -> None:
        (flat,) = start_copy([bucket.flat], self._device, bucket.ready)
        with on_incoming(bucket.flat.device, self._device):
            sums: list[Tensor] = []
            parts: list[Tensor] = []
            # a parameter reached twice (reentrant checkpointing) is sent twice; each gradient is added
            for i, part in zip(bucket.parameters, unflattened(flat, bucket.shapes), strict=True):
                if i in self._sums:
                    sums.append(self._sums[i])
                    parts.append(part)
                else:
                    self._sums[i] = part
            if sums:
                of_torch.foreach_add_(sums, parts)

    def _add_rest(self, parameters: Sequence[Tensor]) -> None:
        """Add the gradients that a replica's parameters still have, one bucket at a time."""
        rest = [(i, parameter) for i, parameter in enumerate(parameters) if parameter.grad is not None]
        for i, parameter in [(i, p) for i, p in rest if _gradient(p).layout is not torch.strided]:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            self._add([i], [_hooked(self._root[i], gradient.to(self._device))])
        rest = [(i, parameter) for i, parameter in rest if parameter.grad is not None]
        for bucket in buckets([_gradient(p) for _, p in rest], self._bucket_bytes):
            taken = [rest[place] for place in bucket]
            gradients = [_gradient(p) for _, p in taken]
            for _, parameter in taken:
                parameter.grad = None
            moved = gradients if gradients[0].device == self._device else move_coalesced(gradients, self._device)
            hooked = [_hooked(self._root[i], gradient) for (i, _), gradient in zip(taken, moved, strict=True)]
            self._add([i for i, _ in taken], hooked)

    def _add(self, indices: list[int], gradients: list[Tensor]) -> None:
        sums: list[Tensor] = []
        parts: list[Tensor] = []
        for i, gradient in zip(indices, gradients, strict=True):
            total = self._root[i].grad
            if total is None or gradient.layout is not torch.strided or total.layout is not torch.strided:
                self._root[i].grad = gradient if total is None else total + gradient
            else:
                sums.append(total)
                parts.append(gradient)
        if sums:
            of_torch.foreach_add_(sums, parts)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _hooked(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Pass a replica's gradient through the root parameter's hooks, as autograd does with the root's gradient."""
    for hook in tuple((of_torch.backward_hooks(parameter) or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


class _Sender:
    """Packs one replica's gradients in its backward, but for those that hooks of the root's parameters must see."""

    def __init__(self, root: Sequence[Tensor], parameters: Sequence[Tensor], bucket_bytes: int) -> None:
        self._root = root
        self._parameters = parameters
        self._bucket_bytes = bucket_bytes
        self._open: list[tuple[int, Tensor]] = []
        self._open_bytes = 0
        self._send: Callable[[_Bucket], None] | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.device = parameters[0].device if parameters else torch.device("cpu")

    def sends_beside(self, root: torch.device) -> bool:
        """Whether gradients can be sent while backward is running."""
        return self.device != root and is_accelerator(self.device) and is_accelerator(root)

    def attach(self, send: Callable[[_Bucket], None]) -> None:
        """Send from now on what is ready."""
        self._send = send
        trained = [(i, p) for i, p in enumerate(self._parameters) if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(partial(self._ready, i)) for i, p in trained]

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _ready(self, i: int, parameter: Tensor) -> None:
        gradient = _gradient(parameter)
        if gradient.layout is not torch.strided or of_torch.backward_hooks(self._root[i]):
            return
        if self._open and gradient.dtype != self._open[0][1].dtype:
            self.flush()
        self._open.append((i, gradient))
        self._open_bytes += gradient.nbytes
        parameter.grad = None
        if self._open_bytes >= self._bucket_bytes:
            self.flush()

    def flush(self) -> None:
        """Send the open bucket."""
        opened, self._open, self._open_bytes = self._open, [], 0
        if not opened:
            return
        assert self._send is not None
        with torch.no_grad():
            gradients = [gradient for _, gradient in opened]
            flat = flattened(gradients)
            shapes = [gradient.shape for gradient in gradients]
        self._send(_Bucket([i for i, _ in opened], flat, shapes, work_so_far(self.device)))
