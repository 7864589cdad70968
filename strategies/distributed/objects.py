"""Exchange objects and bytes between ranks: as CPU tensors, in pieces of bounded size.

torch's own exchange of objects puts every rank's whole object beside the others', padded to the longest, on the GPU if
the group can't send CPU tensors.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PIECE_BYTES = 2**26
"""Bytes that each rank sends at once."""

SMALL_BYTES = 2**12
"""Bytes of a pickled object that travel with its size; ranks whose objects have no more exchange them at once."""

BROADCAST_BYTES = 2**14
"""The same for an object that one rank sends; the states of random generators have 12 KB."""


def backend_for(backend: str | None, device: torch.device) -> str:
    """Choose the communication backend of a device, which can always send CPU tensors, too.

    Args:
        backend: what the user asked for; None for the default.
        device: the process's root device.

    Returns:
        `cpu:gloo,cuda:nccl` where NCCL is meant, the default on CUDA; otherwise what was asked for, or `gloo`.
    """
    if backend is None:
        backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    return "cpu:gloo,cuda:nccl" if backend.lower() in ("nccl", "cuda:nccl") else backend


def sends_cpu_tensors(group: Any = None) -> bool:
    """Whether a process group has a backend for CPU tensors."""
    return "cpu:" in dist.get_backend_config(group)


def gather_objects(value: Any, group: Any = None, only_first: bool = False) -> list[Any]:
    """Gather the values of all ranks, in order of rank; anything that can be pickled.

    Args:
        group: the process group; None for that of all ranks.
        only_first: whether only rank 0 receives them; the list is empty on the others.
    """
    device, pickled = _device_of(group), pickle.dumps(value)
    all_small = gather_rows(_beginning(pickled, SMALL_BYTES).to(device), group)
    received = [small.tobytes() for small in all_small.cpu().numpy()]
    sizes = [_size(small) for small in received]
    if max(sizes) > SMALL_BYTES:
        wholes = exchange_bytes(_tensor(pickled).to(device), sizes, group, only_first)
        return [pickle.loads(whole.cpu().numpy().data) for whole in wholes]
    return [] if only_first and dist.get_rank() else [pickle.loads(small[8:]) for small in received]


def gather_rows(own: Tensor, group: Any = None) -> Tensor:
    """Gather small tensors of one shape from all ranks.

    Never by a sum, which would meet the gradients' where ranks disagree on what they do.

    Args:
        own: this rank's, of shape (n,).
        group: the process group; None for that of all ranks.

    Returns:
        The tensors of all ranks, of shape (ranks, n), in order of rank.
    """
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
    """Send the value of rank `src` to all ranks; anything that can be pickled.

    Returns:
        The value; on rank `src` the object itself.
    """
    is_source, device = dist.get_rank() == src, _device_of(None)
    pickled = pickle.dumps(value) if is_source else b""
    small = _beginning(pickled, BROADCAST_BYTES).to(device)
    dist.broadcast(small, src)
    received = small.cpu().numpy().tobytes()
    if (size := _size(received)) > BROADCAST_BYTES:
        whole = _tensor(pickled or bytes(size)).to(device)
        dist.broadcast(whole, src)
        received = received[:8] + whole.cpu().numpy().tobytes()
    return value if is_source else pickle.loads(received[8:])


def _device_of(group: Any) -> torch.device | None:
    return torch.device("cpu") if sends_cpu_tensors(group) else torch.accelerator.current_accelerator()


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _beginning(pickled: bytes, num_bytes: int) -> Tensor:
    """The size of a pickled object, and its first bytes, of shape (8 + num_bytes,) and type uint8."""
    return _tensor(len(pickled).to_bytes(8, "little") + pickled[:num_bytes].ljust(num_bytes))


def _size(beginning: bytes) -> int:
    return int.from_bytes(beginning[:8], "little")


def gather_on_first(value: Any) -> list[Any] | None:
    """Gather the values of all ranks on rank 0, in order of rank; None on the others."""
    gathered = gather_objects(value, only_first=True)
    return gathered if dist.get_rank() == 0 else None


def exchange_bytes(content: Tensor, sizes: Sequence[int], group: Any = None, only_first: bool = False) -> list[Tensor]:
    """Gather bytes of all ranks, piece by piece.

    Args:
        content: this rank's bytes, of shape (sizes[rank],) and type uint8.
        sizes: bytes of every rank.
        group: the process group; None for that of all ranks.
        only_first: whether only rank 0 receives.

    Returns:
        The bytes of every rank, on the device of `content`; an empty list where nothing is received.
    """
    receives = not only_first or dist.get_rank() == 0
    received = [content.new_empty(size) for size in sizes] if receives else []
    longest = max(sizes)
    for start in range(0, longest, PIECE_BYTES):
        sent = content.new_zeros(min(PIECE_BYTES, longest - start))
        own = content[start : start + len(sent)]
        sent[: len(own)] = own
        pieces = [torch.empty_like(sent) for _ in received]
        if only_first:
            dist.gather(sent, pieces or None, dst=0, group=group)
        else:
            dist.all_gather(pieces, sent, group)
        for whole, piece in zip(received, pieces, strict=True):
            part = whole[start : start + len(piece)]
            part.copy_(piece[: len(part)])
    return received
