"""Reduce tensors over the ranks, and gather their rows.

gloo's all_reduce passes pieces from neighbour to neighbour, in 2 (n - 1) rounds of n ranks. Small CPU tensors of three
or more ranks go through rank 0 instead (benchmarks/all_reduce.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..core.devices import precise_dtype

SMALL_BYTES = 2**22
"""Bytes that rank 0 receives of all ranks together, at most, where a tensor goes through it."""

FEW = 2
"""Numbers that all_reduce passes on as fast."""

_COMBINED: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda rows: rows.sum(0, dtype=rows.dtype),
    dist.ReduceOp.MAX: lambda rows: rows.amax(0),
    dist.ReduceOp.MIN: lambda rows: rows.amin(0),
}


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    """Reduce a tensor, of one shape and type on all ranks, in place."""
    combined = _COMBINED.get(op) if are_small([tensor], group) else None
    if combined is None:
        dist.all_reduce(tensor, op=op, group=group)
        return
    first = 0 if group is None else dist.get_global_rank(group, 0)
    whole, tag = tensor.contiguous(), tensor.nbytes  # what differs in size does not meet
    if dist.get_rank() == first:
        ranks = dist.get_process_group_ranks(group)[1:]
        rows = whole.new_empty(1 + len(ranks), *whole.shape)
        works = [dist.irecv(row, rank, group, tag) for row, rank in zip(rows[1:], ranks, strict=True)]
        rows[0] = whole
        for work in works:
            assert work is not None
            work.wait()
        whole = combined(rows)
    else:
        dist.send(whole, first, group, tag)
    dist.broadcast(whole, first, group)
    tensor.copy_(whole)


def are_small(tensors: Sequence[Tensor], group: Any = None) -> bool:
    """Whether tensors, together, go through rank 0."""
    num_ranks = dist.get_world_size(group)
    if num_ranks < 3 or not all(tensor.is_cpu and tensor.layout is torch.strided for tensor in tensors):
        return False
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    return sum(tensor.numel() for tensor in tensors) > FEW and num_bytes * num_ranks <= SMALL_BYTES


def average_gradients(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket of gradients over the ranks: a communication hook of DDP."""
    gradients, averaged = bucket.buffer(), Future[Tensor]()
    all_reduce(gradients.div_(dist.get_world_size(group)), group=group)
    averaged.set_result(gradients)
    return averaged


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
    all_reduce(result, op, group)
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
        all_reduce(gradient, group=ctx.group)
        return gradient.split(ctx.sizes)[dist.get_rank(ctx.group)], None, None
