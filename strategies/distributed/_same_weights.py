"""Give all ranks the weights of rank 0 before anything reads them, and warn about state that they do not share.

DistributedDataParallel does so when it wraps the module. That is after the hooks `setup`: what a callback copies there,
such as the initial weights of a lottery ticket, would be each rank's own where the ranks were not seeded alike. An
evaluation does not wrap the module at all.
"""

import hashlib
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from ..core.private.of_torch import BatchNorm
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


class StateWatch:
    """Warns, once, about tensors that a training step carries to the next, if each rank has its own.

    A moving average of a reward or of a codebook is one: each rank's is of the samples that the rank has seen. Metrics
    combine their states, and BatchNorm's are documented. The second step shows which tensors the first one left.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._num_steps = 0
        self.has_ended = False
        """Whether there is nothing left to watch."""

    @contextmanager
    def watching(self, module: nn.Module) -> Generator[None]:
        """Watch one training step; every rank must call it."""
        self._num_steps += 1
        before = _states(module) if self._num_steps == 2 else {}
        yield
        if self._num_steps != 2:
            return
        after = _states(module)
        kept = before.keys() & after.keys()
        changed = {name: _sample(after[name][0]) for name in kept if _differ(before[name], after[name])}
        told = gather_objects(changed)
        self.has_ended = True
        if names := sorted(name for name in {*changed}.union(*told) if len({rank.get(name) for rank in told}) > 1):
            rank_zero_warn(
                f"{self._strategy}: training_step changes {', '.join(names)} on each rank by its own samples. If later "
                "steps read it, training is not one device's: combine it over the ranks "
                "(self.trainer.strategy.reduce(value)), or use strategy=single_device."
            )


def _states(module: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Tensors of the module that are neither parameters nor a metric's or a BatchNorm layer's, with their versions."""
    parts = [(name, part) for name, part in module.named_modules() if not isinstance(part, (Metric, BatchNorm))]
    values = {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, part in parts
        for name, value in [*vars(part).items(), *part.named_buffers(recurse=False)]
        if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad and _is_plain(value)
    }
    return {name: (value, value._version) for name, value in values.items()}


def _differ(before: tuple[Tensor, int], after: tuple[Tensor, int]) -> bool:
    return before[0] is not after[0] or before[1] != after[1]


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has elements of its own on one device, and counts writes to them."""
    return not is_lazy(tensor) and not tensor.is_meta and not tensor.is_inference() and type(tensor.data) is Tensor


def _sample(tensor: Tensor) -> str:
    """A digest of some elements of a tensor."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return ""
    flat = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _SAMPLED)]
    return hashlib.sha256(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
