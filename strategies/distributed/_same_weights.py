"""Give all ranks the weights of rank 0 before anything reads them.

DistributedDataParallel does so when it wraps the module. That is after the hooks `setup`: what a callback copies there,
such as the initial weights of a lottery ticket, would be each rank's own where the ranks were not seeded alike. An
evaluation does not wrap the module at all.
"""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .objects import gather_objects, sends_cpu_tensors

_SAMPLED = 256
"""Elements per tensor that are compared; initial weights drawn under another seed differ in all of them."""


def give_same_weights(module: nn.Module, root_device: torch.device) -> None:
    """Copy rank 0's parameters and buffers to all ranks, if they differ; every rank must call it.

    Ranks whose modules differ in names, shapes or types are left alone: the wrapper names what differs.

    Args:
        root_device: this rank's device, by which tensors are sent if the group can't send CPU tensors.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = {name: tensor for name, tensor in named if _is_plain(tensor)}
    layout = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    told = gather_objects((layout, [_sample(tensor) for tensor in tensors.values()]))
    if any(other[0] != layout for other in told) or all(other[1] == told[0][1] for other in told):
        return
    for tensor in tensors.values():
        device = tensor.device if sends_cpu_tensors() else root_device
        sent = tensor.detach().to(device).contiguous()
        dist.broadcast(sent, src=0)
        with torch.no_grad():
            tensor.copy_(sent)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has elements of its own on one device."""
    return not is_lazy(tensor) and not tensor.is_meta and type(tensor.data) is Tensor


def _sample(tensor: Tensor) -> str:
    """A digest of some elements of a tensor."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return ""
    flat = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _SAMPLED)]
    return hashlib.sha256(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
