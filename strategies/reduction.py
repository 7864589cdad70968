"""Combine what chunks gave: losses weighted by n_i/N, and gradients summed onto the root's parameters.

With chunk losses L_i that are means over w_i samples (or tokens), the root optimizes sum(w_i / W * L_i), W = sum(w_i),
which is the mean over the whole batch, however unequal the chunks are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from .chunks import join
from .devices import is_accelerator, move_coalesced
from .exceptions import ConfigError
from .weights import loss_weight

LossReduction: TypeAlias = Literal["mean", "sum"]
"""Whether a module's loss is a mean over samples or a sum."""

BUCKET_BYTES = 2**25
"""Bytes of gradients that are moved to the root in one transfer while backward goes on."""


@dataclass(frozen=True)
class ChunkLosses:
    """The losses of all chunks of a batch.

    Args:
        losses: one scalar per chunk that has samples, each on its own device.
        weights: samples per chunk, or what the module returned as `loss_weight`.
        reduction: what a module's loss is.
    """

    losses: list[Tensor]
    weights: list[Tensor | float]
    reduction: LossReduction = "mean"

    def combine(self, device: torch.device) -> Tensor:
        """The loss of the whole batch, on `device`, of shape ()."""
        moved = [loss.to(device).reshape(()) for loss in self.losses]
        if self.reduction == "sum":
            return torch.stack(moved).sum()
        weights = [_on(weight, device) for weight in self.weights]
        parts = [loss * share for loss, share in zip(moved, _shares(weights), strict=True)]
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

    def total(self, device: torch.device) -> Tensor | float:
        """The sum of the weights; a float where all of them are."""
        return sum((_on(weight, device) for weight in self.weights), start=0.0)


def chunk_losses(
    outputs: Sequence[Any], chunks: Sequence[Any], sizes: Sequence[int], reduction: LossReduction, strategy: str
) -> ChunkLosses:
    """Read the losses and their weights from what `training_step` returned for each chunk.

    Args:
        outputs: one per chunk, a loss or a mapping with `loss`.
        chunks: the chunks.
        sizes: samples per chunk.
        reduction: what a module's loss is.
        strategy: the name to begin errors with.

    Raises:
        ConfigError: a loss is missing, or is no scalar.
    """
    losses: list[Any] = [output.get("loss") if isinstance(output, dict) else output for output in outputs]
    for i, loss in enumerate(losses):
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise ConfigError(
                f"{strategy}: training_step returned a loss of {found} for a chunk of {sizes[i]} samples. Return a "
                "scalar, the mean over the chunk's samples; or define training_step_end(outputs) and compute it there."
            )
    given = [isinstance(output, dict) and output.get("loss_weight") is not None for output in outputs]
    weights: list[Tensor | float] = [float(size) for size in sizes]
    if any(given):
        weights = [loss_weight(output, chunk) for output, chunk in zip(outputs, chunks, strict=True)]
    return ChunkLosses(losses, weights, reduction)


def with_scalars(
    loss: Tensor, losses: ChunkLosses, outputs: Sequence[dict[str, Any]], sizes: Sequence[int], device: torch.device
) -> tuple[dict[str, Any], list[str]]:
    """Join what chunks returned beside their losses, as far as it is scalar; what is larger stays where it is.

    Args:
        loss: the loss of the whole batch.
        losses: the losses of the chunks.
        outputs: one per chunk.
        sizes: samples per chunk.
        device: where the result is to be.

    Returns:
        `loss`, the sum of `loss_weight` where the module gave it, and means of scalars; and the keys left out.
    """
    result: dict[str, Any] = {"loss": loss}
    left_out: list[str] = []
    for key in outputs[0].keys() - {"loss"}:
        values = [output.get(key) for output in outputs]
        if key == "loss_weight":
            result[key] = losses.total(device)
        elif isinstance(values[0], (int, float, str)) or (isinstance(values[0], Tensor) and not values[0].dim()):
            result[key] = join(values, sizes, device)
        else:
            left_out.append(key)
    return result, left_out


def _shares(weights: Sequence[Any]) -> list[Any]:
    """Each weight's part of their sum; equal parts where nothing weighs anything (a batch of padding only)."""
    total: Any = sum(weights, start=0.0)
    if not isinstance(total, Tensor):
        return [weight / total if total else 1.0 / len(weights) for weight in weights]
    return [torch.where(total == 0, 1.0 / len(weights), weight / total) for weight in weights]


def _on(weight: Tensor | float, device: torch.device) -> Any:
    return weight.to(device) if isinstance(weight, Tensor) else float(weight)


class GradientSum:
    """Sums the replicas' gradients onto the root's parameters after each backward.

    A replica on another accelerator sends its gradients in buckets while its backward goes on; the others' are added
    when backward has ended. The replicas keep no gradient.

    Args:
        root: the root's parameters.
        replicas: for each other replica its parameters, in the order of the root's.
        overlap: send while backward goes on; None decides by the devices.
        bucket_bytes: bytes that are sent at once.
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
        """Leave the replicas' parameters as they were."""
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
    """Give a replica's gradient to the hooks of the root's parameter, as autograd does with the root's own."""
    for hook in tuple((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


class _Sender:
    """Takes one replica's gradients to the root's device."""

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
        """Indices and gradients, on the root's device, of all parameters that have one; the replica's are gone."""
        for i, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._bucket.append((i, parameter.grad))
                parameter.grad = None
        self._send()
        taken, self._sent = self._sent, []
        # a parameter that was reached twice (reentrant checkpointing) is sent twice; each is added by itself
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
