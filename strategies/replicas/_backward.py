"""Run the backward pass of all replicas as one node of autograd, whose inputs are the root's parameters.

    loss.backward()
      └ the node: the backward pass of every replica, the root being one → sums of their gradients
          └ the root's parameters: hooks, DDP's reducer, accumulation; once, with the sums

So nothing else needs to know of replicas. What the backward pass of the root's part leaves in `.grad` is taken away
again before the node ends, and the hooks of the root's parameters are off until then.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.devices import buckets, flattened, is_accelerator, move_coalesced, unflattened
from ..core.errors import ConfigError
from ..core.patching import hooks_of, without_hooks
from ..core.side_streams import beside, finish_beside, finish_copy, start_copy, work_so_far

BUCKET_BYTES = 2**25
"""Bytes of gradients moved to the root in one transfer."""

Expect: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor | None]], None]
"""Told, in a backward pass, which parameters are about to get which gradients."""


class ReplicasBackward:
    """Makes losses whose backward pass is that of all replicas.

    Args:
        parameters: of each replica, the root first, in the same order.
        expect: called before the sums reach the root's parameters.
        overlap: send gradients to the root during the backward pass; None decides by the devices.
        bucket_bytes: bytes per transfer.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[Tensor]],
        expect: Expect | None = None,
        overlap: bool | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._root, *self._replicas = map(list, parameters)
        self._expect = expect
        self._bucket_bytes = bucket_bytes
        by_device: dict[torch.device, list[int]] = {}
        for i, parameter in enumerate(self._root):
            by_device.setdefault(parameter.device, []).append(i)
        sums = [
            _RunningSum(device, [(i, [own[i] for own in self._replicas]) for i in indices], overlap, bucket_bytes)
            for device, indices in by_device.items()
        ]
        self._sums = [running for running in sums if running.has_senders]

    def attach(self, loss: Any) -> Any:
        """Return a loss with this value, whose backward pass is that of all replicas; without a graph, the same."""
        if not (isinstance(loss, Tensor) and loss.requires_grad):
            return loss
        trained = [i for i, parameter in enumerate(self._root) if parameter.requires_grad]
        return _Node.apply(self, [loss], trained, *[self._root[i] for i in trained])

    def run(self, loss: Tensor, gradient: Tensor, trained: Sequence[int], keep_graph: bool) -> list[Tensor | None]:
        """Run the backward pass of all replicas; returns the sums for the parameters `trained` of the root."""
        root = self._root
        before = [parameter.grad for parameter in root]
        with without_hooks(root):  # pyright: ignore[reportArgumentType]  # they are parameters
            for parameter in root:
                parameter.grad = None
            try:
                torch.autograd.backward(loss, gradient, keep_graph)
                sums = self._collect()
            finally:
                for parameter, own in zip(root, before, strict=True):
                    parameter.grad = own
        found = [sums.pop(i, None) for i in trained]
        for i, gradient in sums.items():  # frozen since the forward pass
            own = root[i].grad
            root[i].grad = gradient if own is None else own + gradient
        parameters = [root[i] for i in trained]
        if self._expect is not None:
            self._expect(parameters, found)
        # autograd would call them with None
        idle = [p for p, gradient in zip(parameters, found, strict=True) if gradient is None and any(hooks_of(p))]
        if idle:
            off = ExitStack()
            off.enter_context(without_hooks(idle))  # pyright: ignore[reportArgumentType]  # likewise
            torch.autograd.Variable._execution_engine.queue_callback(off.close)
        return found

    def close(self) -> None:
        """Remove the hooks from the replicas' parameters."""
        for running in self._sums:
            running.remove_hooks()

    def _collect(self) -> dict[int, Tensor]:
        """Take the gradients of all replicas, and return their sums by parameter."""
        total: dict[int, Tensor] = {}
        with torch.no_grad():
            total |= _taken(self._root)
            for running in self._sums:
                _add(total, running.finish())
            for parameters in self._replicas:
                self._add_rest(total, _taken(parameters))
        return total

    def _add_rest(self, total: dict[int, Tensor], rest: list[tuple[int, Tensor]]) -> None:
        """Add what a replica has not sent, one bucket at a time."""
        away: dict[torch.device, list[tuple[int, Tensor]]] = {}
        near: list[tuple[int, Tensor]] = []
        for i, gradient in rest:
            device = self._root[i].device
            if gradient.device == device or gradient.layout is not torch.strided:
                near.append((i, gradient.to(device)))
            else:
                away.setdefault(device, []).append((i, gradient))
        _add(total, near)
        rest.clear()
        for device, group in away.items():
            for bucket in buckets([gradient for _, gradient in group], self._bucket_bytes):
                moved = move_coalesced([group[place][1] for place in bucket], device)
                _add(total, [(group[place][0], gradient) for place, gradient in zip(bucket, moved, strict=True)])


class _Node(torch.autograd.Function):
    """A loss whose backward pass is that of all replicas."""

    @staticmethod
    def forward(
        ctx: Any, replicas: ReplicasBackward, losses: list[Tensor], trained: Sequence[int], *parameters: Tensor
    ) -> Tensor:
        ctx.replicas, ctx.losses, ctx.trained = replicas, losses, trained
        return losses[0].detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise ConfigError(
                "A backward pass with create_graph=True can't go through replicas. Compute the gradient within "
                "training_step by torch.autograd.grad(..., create_graph=True), or use strategy=ddp."
            )
        engine: Any = torch._C
        losses, keep_graph = ctx.losses, engine._autograd._get_current_graph_task_keep_graph()
        if losses is None:
            raise RuntimeError("The loss of replicas can go backward again only with retain_graph=True the first time.")
        if not keep_graph:
            ctx.losses = None
        return None, None, None, *ctx.replicas.run(losses[0], grad_outputs[0], ctx.trained, keep_graph)


def _taken(parameters: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Take the gradients away from parameters: (number of the parameter, gradient)."""
    found = [(i, gradient) for i, parameter in enumerate(parameters) if (gradient := parameter.grad) is not None]
    for i, _ in found:
        parameters[i].grad = None
    return found


def _add(total: dict[int, Tensor], gradients: Iterable[tuple[int, Tensor]]) -> None:
    """Add gradients to sums, in place."""
    sums: list[Tensor] = []
    parts: list[Tensor] = []
    for i, gradient in gradients:
        before = total.setdefault(i, gradient)
        if before is not gradient and before.layout is gradient.layout is torch.strided:
            sums.append(before)
            parts.append(gradient)
        elif before is not gradient:
            total[i] = before + gradient
    if sums:
        torch._foreach_add_(sums, parts)


@dataclass(frozen=True)
class _Bucket:
    """Gradients of one replica, one after the other, and when its device has computed them."""

    parameters: list[int]
    flat: Tensor
    shapes: list[torch.Size]
    ready: torch.Event | None


class _RunningSum:
    """Sums on a device of the root what replicas on other accelerators send during their backward pass.

    Each sends its gradients in buckets, which are added at once, so that the root holds its own gradients, the sum and
    one bucket, whatever the number of replicas. They take turns, so that the order of additions is the same in every
    run:

        first bucket of replica 1, 2, ..., second bucket of replica 1, 2, ...

    Args:
        parameters: (number, the parameter of each replica).
    """

    def __init__(
        self,
        device: torch.device,
        parameters: Sequence[tuple[int, Sequence[Tensor]]],
        overlap: bool | None,
        bucket_bytes: int,
    ) -> None:
        self._device = device
        self._sums: dict[int, Tensor] = {}
        self._turn = 0
        self._lock = threading.Lock()
        senders = [
            _Sender([(i, own[replica]) for i, own in parameters], bucket_bytes)
            for replica in range(len(parameters[0][1]))
        ]
        self._senders = [s for s in senders if (s.sends_beside(device) if overlap is None else overlap)]
        self._waiting: list[deque[_Bucket]] = [deque() for _ in self._senders]
        for queue, sender in zip(self._waiting, self._senders, strict=True):
            sender.attach(partial(self._receive, queue))

    @property
    def has_senders(self) -> bool:
        """Whether any replica sends gradients during its backward pass."""
        return bool(self._senders)

    def finish(self) -> Iterable[tuple[int, Tensor]]:
        """Add what is left, and return the sums."""
        for sender in self._senders:
            sender.flush()
        for queue in self._waiting:  # for the turns of replicas that have sent less, or had no samples
            while queue:
                self._add(queue.popleft())
        sums, self._sums, self._turn = self._sums, {}, 0
        if sums:
            finish_beside(list(sums.values()))
        return sums.items()

    def remove_hooks(self) -> None:
        for sender in self._senders:
            sender.remove_hooks()

    def _receive(self, queue: deque[_Bucket], bucket: _Bucket) -> None:
        with self._lock, torch.no_grad():
            queue.append(bucket)
            while due := self._waiting[self._turn % len(self._waiting)]:
                self._turn += 1
                self._add(due.popleft())

    def _add(self, bucket: _Bucket) -> None:
        (flat,), arrived = start_copy([bucket.flat], self._device, bucket.ready)
        with beside(self._device):
            finish_copy([flat], arrived)
            # a parameter reached twice (reentrant checkpointing) is sent twice; each gradient is added
            _add(self._sums, zip(bucket.parameters, unflattened(flat, bucket.shapes), strict=True))


class _Sender:
    """Packs one replica's gradients in its backward pass."""

    def __init__(self, parameters: Sequence[tuple[int, Tensor]], bucket_bytes: int) -> None:
        self._parameters = parameters
        self._bucket_bytes = bucket_bytes
        self._open: list[tuple[int, Tensor]] = []
        self._open_bytes = 0
        self._send: Callable[[_Bucket], None] | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._device = parameters[0][1].device

    def sends_beside(self, root: torch.device) -> bool:
        """Whether gradients can be sent while the backward pass is running."""
        return self._device != root and is_accelerator(self._device) and is_accelerator(root)

    def attach(self, send: Callable[[_Bucket], None]) -> None:
        """Send from now on what is ready."""
        self._send = send
        trained = [(i, p) for i, p in self._parameters if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(partial(self._ready, i)) for i, p in trained]

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _ready(self, i: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
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
            flat = flattened([gradient for _, gradient in opened])
            shapes = [gradient.shape for _, gradient in opened]
        self._send(_Bucket([i for i, _ in opened], flat, shapes, work_so_far(self._device)))
