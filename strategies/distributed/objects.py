"""Exchange objects, tensors and weights between ranks, and compare weights.

Ranks train apart where a module computes gradients that nobody averages (as by `loss.backward()` in manual
optimization), or a hook changes gradients, a learning rate or weights by what its rank alone has computed.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..core.devices import precise_dtype
from ..core.errors import ConfigError
from ..core.module_checks import is_plain

_ROUNDED = 8  # units in the last place of the norm, by which a step on another kind of device may differ
_APART = 1e-3  # of the norm, which such ranks don't reach by rounding in thousands of steps


def backend_for(backend: str | None, device: torch.device) -> str:
    """The backend for a root device, if none is given, with gloo beside it for CPU tensors: `cpu:gloo,cuda:nccl`."""
    if backend is None:
        backend = dist.get_default_backend_for_device(device)
        backend = backend if dist.is_backend_available(backend) else "gloo"
    if ":" not in backend:
        kinds = dist.Backend.backend_capability.get(backend.lower(), ["cpu"])
        backend = backend if "cpu" in kinds else ",".join(f"{kind}:{backend.lower()}" for kind in kinds)
    return f"cpu:gloo,{backend}" if ":" in backend and "cpu:" not in backend else backend


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


class Digest(NamedTuple):
    """What ranks compare of a tensor: sum and norm of its elements, and the unit of rounding relative to the norm."""

    name: str
    total: float
    norm: float
    unit: float

    def is_apart(self, other: "Digest", tolerance: float) -> bool:
        """Whether ranks have other values than by rounding; that training has failed (nan) shows by itself."""
        apart, most = (self.total - other.total, self.norm - other.norm), max(tolerance, _ROUNDED * self.unit)
        if self.name != other.name:
            return True
        return all(map(math.isfinite, apart)) and max(map(abs, apart)) > most * (max(self.norm, other.norm) or 1.0)


def digests(named: Iterable[tuple[str, Tensor]]) -> Iterator[Digest]:
    """The digests of tensors of floating-point numbers of more than eight bits."""
    for name, tensor in named:
        if is_plain(tensor) and tensor.is_floating_point() and tensor.element_size() > 1:
            values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
            dtype = precise_dtype(values.device)
            norm = torch.linalg.vector_norm(values, dtype=dtype)
            yield Digest(name, float(values.sum(dtype=dtype)), float(norm), torch.finfo(tensor.dtype).eps)


def trained(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[Digest]:
    """What ranks have in common as long as they train alike: learning rates, and weights that each holds whole."""
    rates = [
        (f"the learning rate of {type(optimizer).__name__}", torch.tensor(float(group["lr"]), dtype=torch.float64))
        for optimizer in optimizers
        for group in optimizer.param_groups
        if "lr" in group
    ]
    return [*digests(rates), *digests(module.named_parameters())]


def _first_differing(ranks: Sequence[Sequence[Digest]], tolerance: float = 0.0) -> str | None:
    """The name of the first tensor that is another one on another rank, by more than a tolerance, in norms."""
    for same in zip_longest(*ranks, fillvalue=Digest("", 0.0, 0.0, 0.0)):
        if any(same[0].is_apart(other, tolerance) for other in same):
            return next(one.name for one in same if one.name)
    return None


def give_same_weights(module: nn.Module, root_device: torch.device) -> None:
    """Copy rank 0's weights and buffers to all ranks, unless these have others, as `verify_same_layout` will tell."""
    ranks = gather_objects(_layout((*module.named_parameters(), *module.named_buffers())))
    if all(layout == ranks[0] for layout in ranks):
        broadcast_weights(module, root_device)


@torch.no_grad()
def broadcast_weights(module: nn.Module, root_device: torch.device) -> None:
    """Copy rank 0's parameters and buffers to all ranks, tensor by tensor; every rank must call it."""
    sends_all = "cpu:" in dist.get_backend_config()
    for tensor in filter(is_plain, (*module.parameters(), *module.buffers())):
        if tensor.numel() and tensor.layout is torch.strided:
            sent = tensor.detach().to(tensor.device if sends_all else root_device).contiguous()
            dist.broadcast(sent, src=0)
            tensor.copy_(sent)


def verify_same_layout(module: nn.Module, strategy: str) -> None:
    """Refuse ranks that train parameters of other names, shapes or types; every rank must call it."""
    named = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    for same in zip_longest(*gather_objects(_layout(named)), fillvalue="none"):
        if len(set(same)) > 1:
            other = next(rank for rank, one in enumerate(same) if one != same[0])
            raise ConfigError(
                f"{strategy}: the ranks have different modules: where rank 0 trains {same[0]}, rank {other} trains "
                f"{same[other]}. Build the same module on all ranks, and freeze the same layers."
            )


def _layout(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The name, type and shape of each plain tensor, as text."""
    plain = [(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in named if is_plain(one)]
    return [f"{name} ({dtype}, shape {shape})" for name, dtype, shape in plain]


class Agreement:
    """Compares the weights over the ranks: where training begins, after the first step of each optimizer, and later."""

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._handles: dict[int, RemovableHandle] = {}  # of optimizers, until after their first step
        self._stepped = set[int]()  # those that have made it: one must not lose a hook while it calls its hooks
        self._written: list[Digest] = []
        self._num_due = 0  # times that the weights are to be compared before anything else happens to them
        self._has_told = False

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        """Compare now, after the next training step, and after the next step of each of these optimizers."""
        self.end()
        self._num_due = 2  # the first step may write to weights without an optimizer
        self._handles = {id(one): one.register_step_post_hook(self._has_stepped) for one in optimizers}

    def end(self) -> None:
        """Compare nothing any more."""
        self._num_due = 0
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._stepped.clear()

    def _has_stepped(self, optimizer: Optimizer, *_: object) -> None:
        self._num_due = max(1, self._num_due)
        self._stepped.add(id(optimizer))

    def note(self, name: str, tensor: Tensor) -> None:
        """Compare a whole tensor, too, of which this rank keeps a part."""
        if (self._num_due or self._handles) and not isinstance(tensor, DTensor):
            self._written += digests([(name, tensor)])

    def verify(self, module: nn.Module) -> None:
        """Compare the weights if it is due, and refuse ranks that have trained apart; every rank must call it."""
        if not self._num_due:
            return
        self._num_due -= 1
        while self._stepped:
            self._handles.pop(self._stepped.pop()).remove()
        weights, self._written = [*self._written, *digests(module.named_parameters())], []
        # running statistics of batch norm may be a rank's own
        layers = [(prefix, layer) for prefix, layer in module.named_modules() if not hasattr(layer, "running_mean")]
        buffers = [one for prefix, layer in layers for one in layer.named_buffers(prefix, recurse=False)]
        ranks = gather_objects((weights, [*digests(buffers)]))
        found = _first_differing([buffers for _, buffers in ranks])
        if found and not self._has_told:
            self._has_told = True
            rank_zero_warn(
                f"{self._strategy}: each rank has its own values of the buffer {found}, computed of its samples; rank "
                "0's are saved. Compute them of self.all_gather(tensor), which has every rank's samples."
            )
        self.compare([weights for weights, _ in ranks], 0.0)

    def compare(self, ranks: Sequence[Sequence[Digest]], tolerance: float = _APART) -> None:
        """Refuse ranks that have trained apart, by what each of them has `trained`; every rank must call it."""
        if found := _first_differing(ranks, tolerance):
            raise ConfigError(
                f"{self._strategy}: the ranks have different values of {found}: each has changed it from values "
                "that it alone has. In manual optimization call self.manual_backward(loss), which averages gradients "
                "over the ranks. In a hook or callback compute the change from what all ranks share: "
                "self.all_gather(x), self.trainer.strategy.reduce(x), or trainer.callback_metrics that were logged "
                "with sync_dist=True. Or set strategy=single_device."
            )
