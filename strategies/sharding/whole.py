"""Put sharded tensors together on rank 0, and cut whole tensors into shards."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer


def gather_tree(tree: Any, keep: bool) -> Any:
    """Replace the sharded tensors in nested dicts, lists and tuples by whole ones, one after the other.

    All ranks must call this with the same structure.

    Args:
        tree: the structure; it is not changed.
        keep: whether this rank needs the values: they are copied to host memory. Elsewhere they are on the meta device.
    """

    def gathered(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        whole = cast(DTensor, tensor.detach()).full_tensor()
        return whole.cpu() if keep else torch.empty_like(whole, device="meta")

    return map_tensors(tree, gathered)


def put_together(
    module: nn.Module, before: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer], keep: bool
) -> None:
    """Give a module, and the optimizers of it, whole parameters in the place of shards.

    All ranks must call this.

    Args:
        before: the parameters, by name, that the shards were cut from; they are used again.
        keep: whether this rank needs the values; see `gather_tree`.
    """
    whole: dict[Any, nn.Parameter] = {}
    for name, shard in list(module.named_parameters(remove_duplicate=False)):
        if shard not in whole:
            gradient, value = gather_tree((shard.grad, shard.detach()), keep)
            parameter = before.get(name, shard)  # a layer that is new has no shards
            parameter = nn.Parameter(value) if parameter.is_meta or not keep else parameter
            parameter.grad = None
            parameter.data = value
            parameter.requires_grad_(shard.requires_grad)
            parameter.grad = gradient
            whole[shard] = parameter
        owner, _, key = name.rpartition(".")
        module.get_submodule(owner).register_parameter(key, whole[shard])
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [whole.get(parameter, parameter) for parameter in group["params"]]
        states = {whole.get(shard, shard): gather_tree(state, keep) for shard, state in optimizer.state.items()}
        optimizer.state.clear()
        optimizer.state.update(states)


def shard_like(whole: Tensor, shard: Any) -> Tensor:
    """Cut a whole tensor, the same on all ranks, as another one is; nothing is communicated.

    Args:
        shard: a tensor that may be sharded. One of another shape says only on which ranks.

    Returns:
        The part of this rank, on the device of `shard`.
    """
    if not isinstance(shard, DTensor) or isinstance(whole, DTensor):
        return whole
    as_cut = whole.shape == shard.shape
    placements = shard.placements if as_cut else [Replicate() for _ in shard.placements]
    return distribute_tensor(whole.to(shard.device), shard.device_mesh, placements, src_data_rank=None)


def shard_entry(entry: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Cut the tensors that an optimizer keeps of a parameter as it is, and copy them: a view would keep the whole."""
    return {
        name: shard_like(value, parameter).clone() if isinstance(value, Tensor) and value.dim() else value
        for name, value in entry.items()
    }


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all tensors as one vector, whole where they are sharded; all ranks must call this alike.

    Args:
        norm_type: 2 for the Euclidean norm, `inf` for the largest absolute value.
    """
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    return get_total_norm([*(norms_of(sharded, norm_type) if sharded else ()), *plain], norm_type)


@torch.no_grad()
def norms_of(tensors: Sequence[DTensor], norm_type: float = 2) -> list[Tensor]:
    """The norms of sharded tensors, of which each rank sends its shards' norms; torch's can't take an empty shard."""
    parts = [part if part.numel() else part.new_zeros(1) for part in (tensor.to_local() for tensor in tensors)]
    own = torch.stack(torch._foreach_norm(parts, norm_type))
    mesh = tensors[0].device_mesh
    found = [torch.empty_like(own) for _ in range(mesh.size(mesh.ndim - 1))]
    dist.all_gather(found, own, group=mesh.get_group(mesh.ndim - 1))  # a maximum over ranks could lose nan
    return list(torch.linalg.vector_norm(torch.stack(found), norm_type, dim=0).unbind())


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Replace the tensors in nested dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        mapped = {key: map_tensors(value, function) for key, value in cast("dict[Any, Any]", tree).items()}
        return OrderedDict(mapped) if isinstance(tree, OrderedDict) else mapped
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(value, function) for value in tree)
    return tree


def apply_anew(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Put new parameters and buffers in the place of those that a function changes, tied ones once.

    `nn.Module._apply` sets `tensor.data` instead, which torch refuses where a tensor becomes one of another kind.
    """
    changed: dict[int, Any] = {}
    for part in module.modules() if recurse else [module]:
        for kind in (part._parameters, part._buffers):
            for name, tensor in kind.items():
                if tensor is None:
                    continue
                if id(tensor) not in changed:
                    with torch.no_grad():
                        new = function(tensor)
                    is_new = new is not tensor and isinstance(tensor, nn.Parameter)
                    changed[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_new else new
                kind[name] = changed[id(tensor)]
    return module


@torch.no_grad()
def broadcast_together(tensors: Sequence[Tensor], bucket_bytes: int, rank: int = 0) -> None:
    """Give all ranks the values that tensors have on one, in few transfers, as DistributedDataParallel does."""
    dist._broadcast_coalesced(cast("dist.ProcessGroup", dist.group.WORLD), list(tensors), bucket_bytes, rank)
