"""What ranks have in common: equal weights at the start, and after the first steps.

DistributedDataParallel gives all ranks the weights of rank 0 when it wraps the module. That is after the hooks `setup`:
what a callback copies there, such as the initial weights of a lottery ticket, would be each rank's own where the ranks
were not seeded alike. An evaluation does not wrap the module at all.

`loss.backward()` and `torch.autograd.grad` in manual optimization compute a rank's own gradients, which nobody
averages; so may a module that overrides `backward`; and a hook that adds noise to gradients draws its own on each rank.
The ranks would train apart, without a word.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning_fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..core.devices import flat_bytes, precise_dtype
from ..core.errors import ConfigError
from ..core.module_checks import is_plain
from .objects import gather_objects, sends_cpu_tensors

_SAMPLED = 256
"""Elements per tensor that are compared; initial weights drawn under another seed differ in all of them."""
_TOLERANCE = 1e-3
"""Relative difference of movements. Devices of several kinds round differently; other samples give other ones."""
_ROUNDED = 4
"""Units in the last place by which an optimizer's step on another kind of device may differ, besides."""


def give_same_weights(module: nn.Module, root_device: torch.device) -> None:
    """Copy rank 0's parameters and buffers to all ranks, if they differ; every rank must call it.

    Ranks whose modules differ in names, shapes or types are left alone: `verify_same_layout` names what differs.

    Args:
        root_device: this rank's device, by which tensors are sent if the group can't send CPU tensors.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = {name: tensor for name, tensor in named if is_plain(tensor)}
    samples = _digest("".join(map(_sample, tensors.values())).encode())
    told = gather_objects((_digest(str([*_layout(tensors)]).encode()), samples))
    if len({layout for layout, _ in told}) == 1 < len(set(told)):
        broadcast_weights(module, root_device)


@torch.no_grad()
def broadcast_weights(module: nn.Module, root_device: torch.device) -> None:
    """Copy rank 0's parameters and buffers to all ranks, tensor by tensor; every rank must call it."""
    for tensor in filter(is_plain, (*module.parameters(), *module.buffers())):
        sent = tensor.detach().to(tensor.device if sends_cpu_tensors() else root_device).contiguous()
        if sent.numel():
            dist.broadcast(sent, src=0)
            tensor.copy_(sent)


def verify_same_layout(module: nn.Module, strategy: str) -> None:
    """Verify that all ranks train the same parameters; every rank must call it.

    Args:
        strategy: what the error names.

    Raises:
        ConfigError: ranks have parameters of other names, shapes or types, or other ones are trained.
    """
    layout = [*_layout({name: p for name, p in module.named_parameters() if p.requires_grad and is_plain(p)})]
    if len(set(gather_objects(_digest(str(layout).encode())))) == 1:
        return
    for same in zip_longest(*gather_objects(layout), fillvalue="none"):
        if len(set(same)) > 1:
            other = next(rank for rank, one in enumerate(same) if one != same[0])
            raise ConfigError(
                f"{strategy}: the ranks have different modules: where rank 0 trains {same[0]}, rank {other} trains "
                f"{same[other]}. Build the same module on all ranks, and freeze the same layers."
            )


def _layout(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """The name, type and shape of each tensor, as text."""
    for name, tensor in tensors.items():
        yield f"{name} ({str(tensor.dtype).removeprefix('torch.')}, shape {tuple(tensor.shape)})"


class Agreement:
    """Compares the weights over the ranks: where training begins, and after the first step of each optimizer.

    Args:
        strategy: what errors name.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._handles: dict[int, RemovableHandle] = {}
        """Of optimizers that have not stepped since `begin`."""
        self._stepped: list[int] = []
        self._written: list[_Moved] = []
        self._last: dict[str, tuple[float, float]] | None = None
        """The sum and the norm of each parameter when they were last compared."""
        self.is_due = False
        """Whether weights are to be compared before anything else happens to them."""
        self._has_warned = False

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        """Compare now, after the next training step, and after the next step of each of these optimizers."""
        self.end()
        self.is_due, self._last = True, None
        self._handles = {id(one): one.register_step_post_hook(self._has_stepped) for one in optimizers}

    def end(self) -> None:
        """Compare nothing any more."""
        self.is_due = False
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _has_stepped(self, optimizer: Optimizer, *_: object) -> None:
        self._stepped.append(id(optimizer))
        self.is_due = True

    def note(self, name: str, tensor: Tensor) -> None:
        """Compare a whole tensor, too, of which this rank keeps a part."""
        if (self.is_due or self._handles) and not isinstance(tensor, DTensor):
            self._written.append(_Moved(name, *_digest_of(tensor), 0.0))

    def verify(self, module: nn.Module) -> None:
        """Compare the weights if it is due, by how far the sum and the norm of each has moved; every rank must call it.

        Raises:
            ConfigError: ranks have trained apart; the message names the first parameter that differs.
        """
        if not self.is_due:
            return
        self.is_due = self._last is None  # the first step may write to weights without an optimizer
        while self._stepped:
            if (handle := self._handles.pop(self._stepped.pop(), None)) is not None:
                handle.remove()
        last, named = self._last or {}, module.named_parameters()
        plain = {name: p for name, p in named if is_plain(p) and p.is_floating_point() and p.element_size() > 1}
        self._last = {name: _digest_of(parameter) for name, parameter in plain.items()}
        moved, self._written = self._written, []
        buffers = [
            _Moved(name, *_digest_of(one), torch.finfo(one.dtype).eps) for name, one in _computed_buffers(module)
        ]
        for name, (total, norm) in self._last.items():
            before = last.get(name, (0.0, 0.0))
            rounding = _ROUNDED * torch.finfo(plain[name].dtype).eps * norm
            moved.append(_Moved(name, total - before[0], norm - before[1], rounding))
        gathered = gather_objects((moved, buffers))
        if (name := _differing([buffers for _, buffers in gathered])) and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{self._strategy}: each rank has its own values of the buffer {name}, computed of its samples; rank "
                "0's are saved. Compute them of self.all_gather(tensor), which has every rank's samples."
            )
        if name := _differing([moved for moved, _ in gathered]):
            raise ConfigError(
                f"{self._strategy}: the ranks have different values of {name}: each has changed it, or its "
                "gradient, by what this rank alone has computed. Compute gradients by self.manual_backward(loss), "
                "which averages them over the ranks, or average them yourself "
                "(self.trainer.strategy.reduce(gradient)), or set strategy=single_device."
            )


class _Moved(NamedTuple):
    """How far the sum and the norm of a tensor have moved; a rank's own rounding is told from other gradients."""

    name: str
    total: float
    norm: float
    rounding: float


def _digest_of(tensor: Tensor) -> tuple[float, float]:
    """The sum and the norm of a tensor's elements."""
    values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    dtype = precise_dtype(values.device)
    return float(values.sum(dtype=dtype)), float(torch.linalg.vector_norm(values, dtype=dtype))


def _computed_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers of floating-point numbers, but for the running statistics of batch norm, which may be a rank's own."""
    for prefix, layer in module.named_modules():
        if not hasattr(layer, "running_mean"):
            for name, buffer in layer.named_buffers(prefix, recurse=False):
                if is_plain(buffer) and buffer.is_floating_point() and buffer.element_size() > 1:
                    yield name, buffer


def _differing(ranks: Iterable[Iterable[_Moved]]) -> str | None:
    """The name of the first tensor that is another one on another rank."""
    for same in zip_longest(*ranks):
        if None in same or any(_disagree(same[0], other) for other in same[1:]):
            return next(one.name for one in same if one is not None)
    return None


def _disagree(one: _Moved, other: _Moved) -> bool:
    if one.name != other.name:
        return True
    if not all(map(math.isfinite, (*one[1:], *other[1:]))):
        return False  # that training has failed shows by itself
    apart = max(abs(one.total - other.total), abs(one.norm - other.norm))
    return apart > one.rounding + other.rounding + _TOLERANCE * max(map(abs, (*one[1:3], *other[1:3])))


def _sample(tensor: Tensor) -> str:
    """A digest of some elements of a tensor."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return ""
    flat = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _SAMPLED)]
    return _digest(flat_bytes(flat.cpu().contiguous()).numpy().tobytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
