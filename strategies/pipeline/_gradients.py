"""Sum the gradients of micro-batches that go backward before the loss of the whole batch is known.

    loss of the batch ─ node ┬─ loss of the last micro-batch ─ stage 1 ─ stage 0 ┐
                             └─ sums of the others, times N / Σ w ───────────────┴─ parameters

So hooks of parameters, accumulation and DDP see one backward pass, of whole gradients, which are there stage by stage.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..batch.exact.loss_reader import graph
from ..batch.results import chunk_losses
from ..core.devices import precise_dtype
from ..core.executor import autocast_types
from ..core.patching import without_hooks
from ..core.transfers import cross

_ALMOST_ZERO = 1e-20
"""Stands in for a weight of zero, which it equals among others; if all are zero, micro-batches have equal shares."""


class EarlyGradients:
    """The gradients of one step, scaled by `loss_scale` meanwhile, so that those in half precision don't vanish.

    Of the parameters with `unread` ids nobody reads the gradients of the last step any more.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        sizes: Sequence[int],
        strategy: str,
        loss_scale: Tensor | None,
        unread: AbstractSet[int] = frozenset(),
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._sizes, self._strategy, self._loss_scale, self._unread = sizes, strategy, loss_scale, unread
        self._weights: list[Tensor | float] = [0.0] * len(sizes)
        self._losses: dict[int, Tensor] = {}
        """Of the micro-batches that have not been backward, by number."""
        self._before: list[Tensor | None] | None = None
        self._restoring = ExitStack()
        self._sums: list[tuple[nn.Parameter, Tensor]] = []

    def take(self, microbatch: int, output: Any) -> Any:
        """Keep the loss that a micro-batch has returned until it goes backward; returns its output, detached."""
        if output is None:
            return None
        found = chunk_losses([output], [self._sizes[microbatch]], self._strategy)
        loss, weight = found.losses[0], found.weights[0]
        if isinstance(weight, Tensor):
            weight = weight.detach().to(precise_dtype(weight.device))
            self._weights[microbatch] = torch.where(weight == 0, _ALMOST_ZERO, weight)
        else:
            self._weights[microbatch] = float(weight) or _ALMOST_ZERO
        if loss.requires_grad:
            self._losses[microbatch] = loss
        return {**output, "loss": loss.detach()} if isinstance(output, dict) else output.detach()

    def nest(self, microbatch: int) -> bool:
        """Whether its backward pass runs others within itself, which add to the gradient of a parameter one by one."""
        loss = self._losses.get(microbatch)
        return loss is not None and any("CheckpointFunction" in node.name() for node in graph(loss))

    def go_backward(self, microbatch: int) -> None:
        """Add the gradients of a micro-batch to the sums."""
        loss = self._losses.pop(microbatch, None)
        if loss is None:
            return
        if self._before is None:  # not earlier: what runs until now may read the gradients of the last step
            self._before = [None if id(p) in self._unread else p.grad for p in self._parameters]
            self._restoring.enter_context(without_hooks(self._parameters))
            for parameter in self._parameters:
                parameter.grad = None
        factor: Any = self._weights[microbatch] / sum(self._sizes)
        if self._loss_scale is not None:
            factor = self._loss_scale.to(loss.device) * _on(factor, loss.device)
        with ExitStack() as stack:  # operations in backward have their types already
            for kind in filter(torch.is_autocast_enabled, autocast_types()):
                stack.enter_context(torch.autocast(kind, enabled=False))
            loss.backward(_filled(factor, loss))

    def collect(self) -> None:
        """Take the sums, and put back the gradients of the last step."""
        for parameter, before in zip(self._parameters, self._before or (), strict=False):
            if parameter.grad is not None:
                self._sums.append((parameter, parameter.grad.detach()))
            parameter.grad = before
        self._before = None
        self._restoring.close()

    def attach(self, loss: Tensor) -> Tensor:
        """Make the batch's loss go backward through the micro-batches that have not, and hand out the sums."""
        parameters, sums = ([one[i] for one in self._sums] for i in range(2))
        kept, self._losses, self._sums = self._losses, {}, []
        if not kept and not sums:
            return loss
        total = sum(_on(weight, loss.device) for weight in self._weights)
        factors = [sum(self._sizes) / total, *(_on(self._weights[i], loss.device) / total for i in kept)]
        if self._loss_scale is not None:
            factors[0] = factors[0] / self._loss_scale.to(loss.device)
        return _OfTheBatch.apply(loss.detach(), factors, sums, *kept.values(), *parameters)


class _OfTheBatch(torch.autograd.Function):
    """The loss of the whole batch: goes on to the losses of micro-batches, and hands sums to parameters."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factors: list[Any], sums: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.factors, ctx.sums = factors, sums
        ctx.losses = [loss.detach() for loss in inputs[: len(factors) - 1]]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator is not typed
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        sums, ctx.sums = ctx.sums, None  # no longer held here, so they need not be copied
        if sums is None:
            raise RuntimeError("The loss of micro-batches can go backward once only: their graphs are freed already.")
        grad = grad_outputs[0].to(torch.promote_types(grad_outputs[0].dtype, torch.float32))
        factor, *shares = (grad * factor for factor in ctx.factors)
        for device in {gradient.device for gradient in sums}:
            (moved,), arrive = cross([factor], device)
            arrive()  # while the device that the factor comes from goes on
            torch._foreach_mul_(
                [one for one in sums if one.device == device], moved
            )  # in place; by kind where they differ
        return (None, None, None, *map(_filled, shares, ctx.losses), *sums)


def _on(value: Tensor | float, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _filled(value: Tensor | float, like: Tensor) -> Tensor:
    """A number as a tensor of one element, like another one."""
    return value.to(like).reshape(like.shape) if isinstance(value, Tensor) else torch.full_like(like, value)
