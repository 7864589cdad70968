"""Sum the replicas' gradients on the root device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.devices import is_accelerator, move_coalesced

BUCKET_BYTES = 2**25
"""Bytes of gradients moved to the root in one transfer during backward."""


class GradientSum:
    """Sums the replicas' gradients onto the root's parameters after each backward.

    A replica on another accelerator sends its gradients in buckets during its backward; the others' are added when
    backward has finished. The replicas keep no gradients.

    Args:
        root: the root's parameters.
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
        self._senders = [_Sender(self._root, parameters, overlap, bucket_bytes) for parameters in replicas]

    def collect(self) -> None:
        """Add every replica's gradients to the root's."""
        with torch.no_grad():
            for sender in self._senders:
                self._add(*sender.take())

    def remove_hooks(self) -> None:
        """Remove the hooks from the replicas' parameters."""
        for sender in self._senders:
            sender.remove_hooks()

    def _add(self, indices: list[int], gradients: list[Tensor]) -> None:
        sums: list[Tensor] = []
        parts: list[Tensor] = []
        for i, sent in zip(indices, gradients, strict=True):
            gradient = _hooked(self._root[i], sent)
            total = self._root[i].grad
            if total is None or gradient.layout is not torch.strided or total.layout is not torch.strided:
                self._root[i].grad = gradient if total is None else total + gradient
            else:
                sums.append(total)
                parts.append(gradient)
        if sums:
            torch._foreach_add_(sums, parts)


def _hooked(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Pass a replica's gradient through the root parameter's hooks, as autograd does with the root's gradient."""
    for hook in tuple((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


class _Sender:
    """Moves one replica's gradients to the root's device."""

    def __init__(
        self, root: Sequence[Tensor], parameters: Sequence[Tensor], overlap: bool | None, bucket_bytes: int
    ) -> None:
        self._parameters = list(parameters)
        self._device = root[0].device if root else torch.device("cpu")
        self._bucket_bytes = bucket_bytes
        self._bucket: list[tuple[int, Tensor]] = []
        self._open_bytes = 0
        self._sent: list[tuple[int, Tensor]] = []
        own = parameters[0].device if parameters else self._device
        if overlap is None:
            overlap = own != self._device and is_accelerator(own) and is_accelerator(self._device)
        trained = [(i, p) for i, p in enumerate(parameters) if overlap and p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready(i)) for i, p in trained]

    def take(self) -> tuple[list[int], list[Tensor]]:
        """Take the indices and gradients, on the root's device, of all parameters that have one."""
        for i, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._bucket.append((i, parameter.grad))
                parameter.grad = None
        self._send()
        taken, self._sent = self._sent, []
        # a parameter reached twice (reentrant checkpointing) is sent twice; each gradient is added
        return [i for i, _ in taken], [gradient for _, gradient in taken]

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _ready(self, i: int) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._bucket.append((i, parameter.grad))
            self._open_bytes += parameter.grad.numel() * parameter.grad.element_size()
            parameter.grad = None
            if self._open_bytes >= self._bucket_bytes:
                self._send()

        return ready

    def _send(self) -> None:
        bucket, self._bucket, self._open_bytes = self._bucket, [], 0
        dense = [(i, gradient) for i, gradient in bucket if gradient.layout is torch.strided]
        self._sent += [(i, gradient.to(self._device)) for i, gradient in bucket if gradient.layout is not torch.strided]
        if dense and dense[0][1].device == self._device:
            self._sent += dense
            return
        for dtype in {gradient.dtype for _, gradient in dense}:
            same = [(i, gradient) for i, gradient in dense if gradient.dtype == dtype]
            moved = move_coalesced([gradient for _, gradient in same], self._device)
            self._sent += [(i, gradient) for (i, _), gradient in zip(same, moved, strict=True)]
