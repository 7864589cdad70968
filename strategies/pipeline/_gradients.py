"""Collect the gradients of micro-batches that go backward before the loss of the whole batch is known.

Micro-batch i goes backward on w_i·L_i / N as soon as the schedule says so, with N the samples of the batch and w_i
those of the micro-batch, or the `loss_weight` that it returned. The sums are kept beside `.grad`. The loss of the whole
batch has one node as its graph: its backward pass, whenever it comes and whatever factor it brings, hands each
parameter its sum times N / Σ w. So hooks of parameters, DDP and accumulation see one backward pass, of whole gradients.

Where ranks may reduce the sums before that pass (see `_reduction.py`), each multiplies its own by its share, so that
the factor that is left is the same on all ranks: with n of a global batch's T samples on one of R ranks a mean over
samples by n·R / (T·N), and a loss with a `loss_weight` by R / T, which leaves T / Σ w over all ranks.
"""

import threading
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..batch.losses import LossReduction, chunk_losses
from ..core.devices import precise_dtype
from ..core.executor import AUTOCAST_TYPES
from ..core.patching import without_hooks
from ..core.private import of_torch
from ._reduction import LastBackward, Reduction

_FUSED = (torch.float32, torch.float64)
"""Types for which one operation scales all gradients of a device: the factor is as exact as they are."""

_ALMOST_ZERO = 1e-20
"""Stands in for a weight of zero, which it equals among others; if all are zero, micro-batches have equal shares."""


@dataclass(eq=False)
class EarlyGradients:
    """The gradients of one step.

    Args:
        parameters: those that may get gradients.
        sizes: samples per micro-batch.
        reduction: whether a micro-batch's loss is a mean or a sum.
        strategy: name that begins messages.
        loss_scale: the gradient scaler's, of shape (), so that gradients in half precision don't vanish; None for 1.
        unread: ids of the parameters whose gradients of the last step nobody reads any more.
        ranks: reduces the sums over ranks; None if that is left to the backward pass of the loss.
    """

    parameters: Sequence[nn.Parameter]
    sizes: Sequence[int]
    reduction: LossReduction
    strategy: str
    loss_scale: Tensor | None
    unread: AbstractSet[int] = frozenset()
    ranks: Reduction | None = None

    def __post_init__(self) -> None:
        self.parameters = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.last = None if self.ranks is None else LastBackward(self.parameters, len(self.sizes), self.ranks)
        """Reduces the sums over ranks; None if nothing does."""
        self._weights: list[Tensor | float] = [0.0] * len(self.sizes)
        self._lock = threading.Lock()
        self._before: list[Tensor | None] | None = None
        self._restoring = ExitStack()
        self._sums: list[tuple[nn.Parameter, Tensor]] = []

    def weighed(self, microbatch: int, output: Any) -> tuple[Tensor, Tensor | None] | None:
        """Weight the loss of a micro-batch: the loss to go backward on, and its gradient (None for 1); or None."""
        if output is None:
            return None
        found = chunk_losses([output], [self.sizes[microbatch]], self.reduction, self.strategy)
        loss, factor = found.losses[0], self.loss_scale
        if self.reduction == "mean":
            weight = self._weights[microbatch] = _not_zero(found.weights[0])
            share = weight * self._per_weight(output)
            factor = share if factor is None else factor.to(loss.device) * _on(share, loss.device)
        if not loss.requires_grad:
            return None
        return loss, None if factor is None else _filled(factor, loss)

    def _per_weight(self, output: Any) -> float:
        """What the loss of a micro-batch times its weight is multiplied by."""
        if self.ranks is not None and isinstance(output, dict) and output.get("loss_weight") is not None:
            if self.ranks.per_weight is not None:
                return self.ranks.per_weight
            self.ranks = self.last = None
        return (1.0 if self.ranks is None else self.ranks.share) / sum(self.sizes)

    def go_backward(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        """Add the gradients of a micro-batch to the sums."""
        with self._lock:
            if self._before is None:  # not earlier: what runs until now may read the gradients of the last step
                self._before = [None if id(p) in self.unread else p.grad for p in self.parameters]
                self._restoring.enter_context(without_hooks(self.parameters))
                for parameter in self.parameters:
                    parameter.grad = None
        with _without_autocast(), nullcontext() if self.last is None else self.last.one():
            loss.backward(gradient)

    def crossed(self) -> None:
        """Learn that a micro-batch goes backward on another stage."""
        if self.last is not None:
            self.last.begin()

    def reduce(self) -> None:
        """Have the sums reduced over the ranks, now that all micro-batches have been backward."""
        if self.last is not None:
            self.last.finish()

    def collect(self) -> None:
        """Take the sums, and put back the gradients of the last step."""
        if self.last is not None:
            self.last.close()
        if self._before is None:
            return
        for parameter, before in zip(self.parameters, self._before, strict=True):
            if parameter.grad is not None:  # a tensor of its own, which may share the memory of a bucket
                self._sums.append((parameter, parameter.grad.detach()))
            parameter.grad = before
        self._before = None
        self._restoring.close()

    def attach(self, loss: Tensor) -> Tensor:
        """Make the sums the gradients of the loss of the whole batch."""
        if not self._sums:
            return loss
        parameters, gradients = zip(*self._sums, strict=True)
        self._sums = []
        factor = self._factor(loss.device)
        return _Delivered.apply(loss.detach(), factor, list(gradients), *parameters)

    def _factor(self, device: torch.device) -> Tensor | float:
        """N / Σ w, without the gradient scaler's scale; or without either what is left for the ranks."""
        factor: Any = 1.0
        if self.reduction == "mean" and self.ranks is None:
            factor = sum(self.sizes) / sum(_on(weight, device) for weight in self._weights)
        return factor if self.loss_scale is None else factor / self.loss_scale.to(device)


class _Delivered(torch.autograd.Function):
    """The loss of the whole batch, whose backward pass hands finished gradients to parameters."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, factor: Tensor | float, gradients: list[Tensor], *parameters: nn.Parameter
    ) -> Tensor:
        ctx.factor, ctx.gradients = factor, gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator is not typed
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # no longer held here, so they need not be copied
        if gradients is None:
            raise RuntimeError("The loss of micro-batches can go backward once only: their graphs are freed already.")
        factor = grad_outputs[0].to(torch.promote_types(grad_outputs[0].dtype, torch.float32)) * ctx.factor
        _scale(gradients, factor)
        return (None, None, None, *gradients)


def _without_autocast() -> ExitStack:
    """Leave the autocast of `training_step`: operations in backward have their types already."""
    stack = ExitStack()
    for kind in AUTOCAST_TYPES:
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a factor of shape (); they may be on several devices, and sparse."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.layout is torch.strided and gradient.dtype in _FUSED:
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        else:
            gradient.mul_(factor.to(gradient.device))
    for (device, dtype), group in groups.items():
        of_torch.foreach_mul_(group, factor.to(device, dtype))


def _not_zero(weight: Tensor | float) -> Tensor | float:
    if isinstance(weight, Tensor):
        weight = weight.detach().to(precise_dtype(weight.device))
        return torch.where(weight == 0, _ALMOST_ZERO, weight)
    return float(weight) or _ALMOST_ZERO


def _on(value: Tensor | float, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _filled(value: Tensor | float, like: Tensor) -> Tensor:
    """A number as a tensor of one element, like another one."""
    return value.to(like).reshape(like.shape) if isinstance(value, Tensor) else torch.full_like(like, value)
