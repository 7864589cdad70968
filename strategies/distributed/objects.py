"""Exchange objects and tensors between ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.devices import precise_dtype


def backend_for(backend: str | None, device: torch.device) -> str:
    """The backend for a root device, if none is given, with gloo beside it for CPU tensors: `cpu:gloo,cuda:nccl`."""
    if backend is None:
        backend = dist.get_default_backend_for_device(device)
        backend = backend if dist.is_backend_available(backend) else "gloo"
    if ":" not in backend:
        kinds = dist.Backend.backend_capability.get(backend.lower(), ["cpu"])
        backend = backend if "cpu" in kinds else ",".join(f"{kind}:{backend.lower()}" for kind in kinds)
    return f"cpu:gloo,{backend}" if ":" in backend and "cpu:" not in backend else backend


def sends_cpu_tensors(group: Any = None) -> bool:
    """Whether a process group has a backend for CPU tensors."""
    return "cpu:" in dist.get_backend_config(group)


def gather_objects(value: Any, group: Any = None, only_first: bool = False) -> list[Any]:
    """Gather what all ranks have, in order of rank, on rank 0 alone if `only_first`; anything that can be pickled."""
    values = [None] * dist.get_world_size(group) if dist.get_rank() == 0 or not only_first else []
    if only_first:
        dist.gather_object(value, values or None, 0, group)
    else:
        dist.all_gather_object(values, value, group)
    return values


def gather_rows(own: Tensor, group: Any = None) -> Tensor:
    """Gather tensors of shape (n,) to one of shape (ranks, n): not by a sum, which could meet that of gradients."""
    rows = own.new_empty(dist.get_world_size(group), len(own))
    if not own.is_cpu:
        dist.all_gather([*rows], own, group)
        return rows
    # gloo's all_gather goes from neighbour to neighbour: with 8 ranks it takes four times the processor time
    first = 0 if group is None else dist.get_global_rank(group, 0)
    dist.gather(own, [*rows] if dist.get_rank() == first else None, first, group)
    dist.broadcast(rows, first, group)
    return rows


def broadcast_object(value: Any, src: int = 0) -> Any:
    """Send the value of rank `src` to all ranks; anything that can be pickled."""
    values = [value]
    dist.broadcast_object_list(values, src)
    return value if dist.get_rank() == src else values[0]


def reduce_tensor(tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
    """Reduce a tensor over the ranks, in place unless it becomes a mean of integers; other values are returned."""
    if not isinstance(tensor, Tensor) or not dist.is_initialized():
        return tensor
    mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    op = dist.ReduceOp.SUM if mean else reduce_op
    op = getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op or dist.ReduceOp.SUM
    # a mean of integers is not an integer: Lightning truncates it, and so epoch means of uneven ranks
    result = tensor if tensor.is_floating_point() or not mean else tensor.to(precise_dtype(tensor.device))
    dist.all_reduce(result, op, group)
    return result.div_(dist.get_world_size(group)) if mean else result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: Any) -> Tensor:
        ctx.group, total = group, summand.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad_outputs[0], ctx.group), None


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
        gradient: Tensor = _Sum.apply(grad_outputs[0], ctx.group)
        return gradient.split(ctx.sizes)[dist.get_rank(ctx.group)], None, None


def gather_unequal(own: Tensor, sizes: Sequence[int], group: Any = None) -> Tensor:
    """Gather the rows of all ranks, each its own `sizes[rank]`, in order; the gradients of all for a row add up."""
    return _Gather.apply(own, sizes, group)  # pyright: ignore[reportReturnType]  # untyped
