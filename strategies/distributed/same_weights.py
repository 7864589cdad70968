"""Compare weights over the ranks: at the start, after the first step of each optimizer, and at epochs' ends.

Ranks train apart, without a word, where a module computes gradients that nobody averages (as by `loss.backward()` in
manual optimization), a hook adds noise of each rank's own to them, or changes a learning rate or weights by what its
rank alone has computed.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

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
from .objects import gather_objects, sends_cpu_tensors

_ROUNDED = 8  # units in the last place of the norm, by which a step on another kind of device may differ
_APART = 1e-3  # of the norm, which such ranks don't reach by rounding in thousands of steps


class Digest(NamedTuple):
    """What ranks compare of a tensor: sum and norm of its elements, and the unit of rounding relative to the norm."""

    name: str
    total: float
    norm: float
    unit: float

    def apart(self, other: "Digest") -> float:
        """By how much ranks have other values, relative to the norm; that training has failed shows by itself."""
        if self.name != other.name:
            return math.inf
        if not all(map(math.isfinite, (*self[1:3], *other[1:3]))):
            return 0.0
        difference = max(abs(self.total - other.total), abs(self.norm - other.norm))
        return difference / (max(self.norm, other.norm) or 1.0)


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


def _first_differing(ranks: Sequence[Sequence[Digest]], tolerance: float = 0.0) -> tuple[str, float] | None:
    """The name of the first tensor that is another one on another rank than by rounding, and by how much."""
    for same in zip_longest(*ranks, fillvalue=Digest("", 0.0, 0.0, 0.0)):
        apart = max(map(same[0].apart, same))
        if apart > max(tolerance, _ROUNDED * same[0].unit):
            return next(one.name for one in same if one.name), apart
    return None


def give_same_weights(module: nn.Module, root_device: torch.device) -> None:
    """Copy rank 0's weights and buffers to all ranks, unless these have others, as `verify_same_layout` will tell."""
    ranks = gather_objects(_layout((*module.named_parameters(), *module.named_buffers())))
    if all(layout == ranks[0] for layout in ranks):
        broadcast_weights(module, root_device)


@torch.no_grad()
def broadcast_weights(module: nn.Module, root_device: torch.device) -> None:
    """Copy rank 0's parameters and buffers to all ranks, tensor by tensor; every rank must call it."""
    for tensor in filter(is_plain, (*module.parameters(), *module.buffers())):
        if tensor.numel() and tensor.layout is torch.strided:
            sent = tensor.detach().to(tensor.device if sends_cpu_tensors() else root_device).contiguous()
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
        self._told = set[str]()

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
        if found := _first_differing([buffers for _, buffers in ranks]):
            self._warn(
                f"each rank has its own values of the buffer {found[0]}, computed of its samples; rank 0's are saved. "
                "Compute them of self.all_gather(tensor), which has every rank's samples.",
                "buffer",
            )
        if found := _first_differing([weights for weights, _ in ranks]):
            raise ConfigError(
                f"{self._strategy}: the ranks have different values of {found[0]}: each has changed it, or its "
                "gradient, by what this rank alone has computed. Compute gradients by self.manual_backward(loss), "
                "which averages them over the ranks, or average them yourself "
                "(self.trainer.strategy.reduce(gradient)), or set strategy=single_device."
            )

    def compare(self, ranks: Sequence[Sequence[Digest]]) -> None:
        """Warn, once, of ranks that have trained apart, by what each of them has `trained` at the end of an epoch."""
        if found := _first_differing(ranks, _APART):
            self._warn(
                f"the ranks have trained apart: {found[0]} differs between them by {found[1]:.1%}. A "
                'hook or callback changes training by what its rank alone has, such as outputs["loss"]. Compute it of '
                "what all ranks have: self.all_gather(x), trainer.strategy.reduce(x), or trainer.callback_metrics that "
                "self.log(..., sync_dist=True) has logged.",
                "weights",
            )

    def _warn(self, text: str, about: str) -> None:
        if about not in self._told:
            self._told.add(about)
            rank_zero_warn(f"{self._strategy}: {text}")
