"""Put sharded tensors together on rank 0, cut whole tensors into shards, and give shards their places in a file."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import get_total_norm


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


def gather_tree(tree: Any, keep: bool) -> Any:
    """Replace the sharded tensors in nested dicts, lists and tuples by whole ones, one after the other.

    All ranks must call this with the same structure; where one does not `keep` the values, which are copied to host
    memory, they are on the meta device.
    """

    def gathered(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        whole = cast(DTensor, tensor.detach()).full_tensor()
        return whole.cpu() if keep else torch.empty_like(whole, device="meta")

    return map_tensors(tree, gathered)


def shard_like(whole: Tensor, shard: Any) -> Tensor:
    """Cut a whole tensor, the same on all ranks, as another one is, without communication; a plain one stays whole.

    Of a `shard` of another shape only its device and its ranks count.
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
    """The norm of all tensors as one vector, whole where they are sharded; all ranks must call this alike."""
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


def apply_anew(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Put new parameters and buffers in the place of those that a function changes, tied ones once.

    `nn.Module._apply` sets `tensor.data` instead, which torch refuses where a tensor becomes one of another kind.
    """
    changed: dict[int, Any] = {}
    for kind in (kind for part in module.modules() for kind in (part._parameters, part._buffers)):
        for name, tensor in kind.items():
            if tensor is None:
                continue
            if id(tensor) not in changed:
                with torch.no_grad():
                    new = function(tensor)
                is_new = new is not tensor and isinstance(tensor, nn.Parameter)
                changed[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_new else new
            kind[name] = changed[id(tensor)]


@torch.no_grad()
def broadcast_together(tensors: Sequence[Tensor], bucket_bytes: int, rank: int = 0) -> None:
    """Give all ranks the values that tensors have on one, in few transfers, as DistributedDataParallel does."""
    dist._broadcast_coalesced(cast("dist.ProcessGroup", dist.group.WORLD), list(tensors), bucket_bytes, rank)


PLACE = "evener_place"
"""The key of a dict that stands for a tensor: where it begins in bytes, its dtype, shape and strides."""
ALIGNMENT = 64
"""Bytes of which each tensor's beginning is a multiple."""


class Entry(NamedTuple):
    """A tensor in a file that all ranks write: where it begins, its rows, and the ranks that it is cut over, 1 if not.

    Torch cuts along dimension 0, in equal chunks but for the last. So the rows of all ranks, one after the other, are
    the whole tensor: whoever reads the file, on any number of ranks, finds whole tensors in it.
    """

    start: int
    num_rows: int
    row_bytes: int
    num_parts: int

    def part(self, index: int) -> tuple[int, int]:
        """Where the rows of a rank begin, and how many bytes they are."""
        chunk = -(-self.num_rows // self.num_parts)
        first, last = (min(self.num_rows, i * chunk) for i in (index, index + 1))
        return self.start + first * self.row_bytes, (last - first) * self.row_bytes


@dataclass
class Placed:
    """A checkpoint with places instead of its sharded tensors.

    Args:
        state: the same on all ranks where it has places.
        parts: this rank's rows of each tensor; None where another rank writes them.
        num_writers: number of ranks that write.
        writer: which of them this rank is; None if it writes nothing.
        num_bytes: of all tensors, with the gaps between them.
    """

    state: Any = None
    entries: list[Entry] = field(default_factory=list[Entry])
    parts: list[Tensor | None] = field(default_factory=list["Tensor | None"])
    num_writers: int = 1
    writer: int | None = None
    num_bytes: int = 0


def place_shards(checkpoint: Mapping[str, Any], is_first: bool) -> Placed:
    """Give each sharded tensor of a checkpoint its place; all ranks must call this with the same structure.

    The first rank writes even if nothing is sharded.
    """
    placed = Placed(writer=0 if is_first else None)

    def place(tensor: Tensor) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        mesh, shape, start = tensor.device_mesh, tensor.shape, placed.num_bytes
        coordinate = cast("list[int]", mesh.get_coordinate())  # every rank is in the mesh
        is_cut = isinstance(tensor.placements[-1], Shard)
        num_rows, placed.num_writers = (shape[0] if is_cut else 1), mesh.size(mesh.ndim - 1)
        num_parts = placed.num_writers if is_cut else 1
        placed.entries.append(Entry(start, num_rows, tensor.nbytes // max(num_rows, 1), num_parts))
        placed.writer = None if any(coordinate[:-1]) else coordinate[-1]
        writes = placed.writer is not None and (is_cut or placed.writer == 0)
        placed.parts.append(cast(DTensor, tensor.detach()).to_local() if writes else None)
        placed.num_bytes = start + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        stride = torch.empty(shape, device="meta").stride()
        return {PLACE: [start, str(tensor.dtype).removeprefix("torch."), list(shape), list(stride)]}

    placed.state = map_tensors(checkpoint, place)
    return placed
