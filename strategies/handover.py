"""Let DDP reduce gradients that are finished already.

DDP's reducer fires while backward goes on, when a parameter's gradient is added to. Where a process sums gradients
first (of replicas, of micro-batches), they are handed over afterwards, in one backward pass that does nothing else.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from pytorch_lightning.overrides.distributed import prepare_for_backward
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def reduce_finished(model: DistributedDataParallel) -> None:
    """Average the gradients that parameters hold over all ranks, unless DDP was told to wait (accumulation)."""
    if not model.require_backward_grad_sync:
        return
    parameters = [p for p in model.parameters() if p.requires_grad and p.grad is not None]
    gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    handover = _Handover.apply(gradients, *parameters)
    prepare_for_backward(model, handover)
    with _without_hooks(parameters):
        handover.backward()


@contextmanager
def _without_hooks(parameters: list[nn.Parameter]) -> Generator[None]:
    """Keep the parameters' hooks, which have seen these gradients already, out of the backward passes inside."""
    hooked: list[tuple[Any, Any]] = [(p, p._backward_hooks) for p in parameters if p._backward_hooks]
    for parameter, _ in hooked:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks


class _Handover(torch.autograd.Function):
    """Gives finished gradients to the parameters in a backward pass, where DDP's reducer waits for them."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # held here no longer, they need not be copied
        return (None, *gradients)
