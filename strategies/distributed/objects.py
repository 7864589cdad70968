"""Exchange objects between ranks: small ones in one exchange, others as torch does, which exchanges sizes first."""

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

SMALL_BYTES = 2**12
"""Bytes of a pickled object that travel with its size; ranks whose objects have no more exchange them at once."""


def backend_for(backend: str | None, device: torch.device) -> str:
    """Choose the communication backend of a device, with gloo beside it for CPU tensors: `cpu:gloo,cuda:nccl`.

    Args:
        backend: what the user asked for; None for the one that torch has for the type of device.
        device: the process's root device.
    """
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
    """Gather the values of all ranks, in order of rank; anything that can be pickled.

    Args:
        group: the process group; None for that of all ranks.
        only_first: whether only rank 0 receives them; the list is empty on the others.
    """
    device, pickled = _device_of(group), _pickled(value)
    beginning = len(pickled).to_bytes(8, "little") + pickled[:SMALL_BYTES].ljust(SMALL_BYTES)
    all_small = gather_rows(torch.frombuffer(bytearray(beginning), dtype=torch.uint8).to(device), group)
    received = [small.tobytes() for small in all_small.cpu().numpy()]
    sizes = [int.from_bytes(small[:8], "little") for small in received]
    receives = not only_first or dist.get_rank() == 0
    if max(sizes) <= SMALL_BYTES:
        return [pickle.loads(small[8:]) for small in received] if receives else []
    found: list[Any] = [None] * len(sizes) if receives else []
    if only_first:
        dist.gather_object(pickled, found or None, 0, group)
    else:
        dist.all_gather_object(found, pickled, group)
    return [pickle.loads(each) for each in found]


class _Pickler(pickle.Pickler):
    """Writes CPU tensors as arrays: by themselves they call `torch.save`, which takes ten times as long."""

    @override
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not obj.is_cpu or obj.requires_grad:
            return NotImplemented
        try:
            return torch.from_numpy, (obj.numpy(),)
        except (TypeError, RuntimeError):  # a type that numpy does not have, a sparse or a conjugated tensor
            return NotImplemented


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def gather_rows(own: Tensor, group: Any = None) -> Tensor:
    """Gather small tensors of shape (n,) from all ranks to one of shape (ranks, n), in order of rank.

    Never by a sum, which would meet the gradients' where ranks disagree on what they do.
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
    """Send the value of rank `src` to all ranks; anything that can be pickled."""
    values = [value]
    dist.broadcast_object_list(values, src, device=_device_of(None))
    return value if dist.get_rank() == src else values[0]


def _device_of(group: Any) -> torch.device | None:
    return torch.device("cpu") if sends_cpu_tensors(group) else torch.accelerator.current_accelerator()
