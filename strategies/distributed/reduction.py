"""Reduce tensors over the ranks, and gather their rows."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.devices import precise_dtype


def reduce_tensor(tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
    """Reduce a tensor over the ranks, in place unless it becomes a mean of integers; other values are returned."""
    if not isinstance(tensor, Tensor) or not dist.is_initialized():
        return tensor
    mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    op = dist.ReduceOp.SUM if mean else reduce_op
    op = getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op or dist.ReduceOp.SUM
    # a mean of integers is not an integer: Lightning truncates it, and so epoch means of uneven ranks
    whole = mean and not tensor.is_floating_point()
    result = tensor.to(precise_dtype(tensor.device)) if whole else tensor
    dist.all_reduce(result, op, group)
    return result.div_(dist.get_world_size(group)) if mean else result


def gather_unequal(own: Tensor, sizes: Sequence[int], group: Any = None) -> Tensor:
    """Gather the rows of all ranks, in order of rank; the gradients of all ranks for a row add up.

    Args:
        own: this rank's, of shape (sizes[rank], ...).
        sizes: rows of every rank.
        group: the process group; None for that of all ranks.
    """
    return _Gather.apply(own, sizes, group)  # pyright: ignore[reportReturnType]  # untyped


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        ranks = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(ranks, padded, group)
        return torch.cat([rows[:size] for rows, size in zip(ranks, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        gradient = grad_outputs[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.split(ctx.sizes)[dist.get_rank(ctx.group)], None, None
