"""What ranks have in common: equal weights at the start, and equal gradients.

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
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..core.errors import ConfigError
from ..core.module_checks import hooked, is_plain
from ..core.optimizer_states import before_update
from ..core.private import of_torch
from .objects import gather_objects, sends_cpu_tensors

_SAMPLED = 256
"""Elements per tensor that are compared; initial weights drawn under another seed differ in all of them."""
_HOOKS = (
    "backward", "on_after_backward", "on_before_optimizer_step", "optimizer_step", "configure_gradient_clipping",
)  # fmt: skip
"""What may change gradients after the ranks have averaged them."""
_TOLERANCE = 1e-3
"""Relative difference of norms and sums. Devices of several kinds round differently; other samples give other ones."""


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
    if len({layout for layout, _ in told}) > 1 or len(set(told)) == 1:
        return
    for tensor in tensors.values():
        device = tensor.device if sends_cpu_tensors() else root_device
        sent = tensor.detach().to(device).contiguous()
        dist.broadcast(sent, src=0)
        with torch.no_grad():
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
    """Compares what is noted over the ranks, each by its norm and its sum.

    Args:
        strategy: what errors name.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._noted: list[tuple[str, float, float]] = []
        self._handles: list[RemovableHandle] = []
        self._not_updated: set[int] = set()
        """Optimizers that have not stepped yet."""
        self._has_begun = self._may_write = False
        self.has_ended = True
        """Whether there is nothing left to compare."""

    def watch(self, trainer: Trainer, optimizers: Iterable[Optimizer]) -> None:
        """Verify the gradients of each optimizer before its first step, if the user's code may write them.

        Hooks that see the accumulated gradients of a rank may write to the weights: these are compared after the step.
        """
        module = trainer.lightning_module
        self._may_write = any(of_torch.post_accumulate_grad_hooks(p) for p in module.parameters())
        by_hand = not module.automatic_optimization
        if not (by_hand or self._may_write or any(hooked(name, trainer, by_user=True) for name in _HOOKS)):
            return
        given = list(optimizers)
        self._not_updated = set(map(id, given))
        self._handles = [before_update(one, partial(self._verify_gradients, module, one)) for one in given]
        self.has_ended = self._has_begun = False

    def begin_step(self, module: nn.Module) -> None:
        """End after the first step, if each optimizer has stepped; every rank must call it.

        Raises:
            ConfigError: hooks have written other weights on each rank.
        """
        if self._has_begun and not self._not_updated:
            if self._may_write:
                self.verify_weights(module, "a hook of register_post_accumulate_grad_hook")
            self.end()
        self._has_begun = True

    def end(self) -> None:
        """Compare nothing any more."""
        self.has_ended = True
        while self._handles:
            self._handles.pop().remove()

    def _verify_gradients(self, module: LightningModule, optimizer: Optimizer) -> None:
        """Compare an optimizer's gradients right before it first steps."""
        if id(optimizer) not in self._not_updated:
            return
        self._not_updated.discard(id(optimizer))
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.note(names.get(id(parameter), "a parameter"), parameter.grad)
        self.verify("gradients", "training_step or a hook has computed them from what this rank alone has")

    def note(self, name: str, tensor: Tensor) -> None:
        """Note a tensor that is to be the same on all ranks; one that is cut over them is not."""
        if self.has_ended or isinstance(tensor, DTensor):
            return
        values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
        norm = torch.linalg.vector_norm(values, dtype=torch.float64)
        self._noted.append((name, float(norm), float(values.sum(dtype=torch.float64))))

    def verify(self, what: str, cause: str) -> None:
        """Compare what was noted since the last call; every rank must call it.

        Raises:
            ConfigError: something differs between ranks; the message names it.
        """
        noted, self._noted = self._noted, []
        for same in zip_longest(*gather_objects(noted)):
            known = [one for one in same if one is not None]
            if len(known) < len(same) or any(_disagree(known[0], other) for other in known):
                raise ConfigError(
                    f"{self._strategy}: the ranks have different {what} of {known[0][0]}: {cause}. Compute gradients "
                    "by self.manual_backward(loss), which averages them over the ranks, or average them yourself "
                    "(self.trainer.strategy.reduce(gradient)), or set strategy=single_device."
                )

    def verify_weights(self, module: nn.Module, by: str = "training_step") -> None:
        """Compare the weights after the first step of manual optimization, or of hooks.

        Raises:
            ConfigError: the step has changed them by what only one rank has.
        """
        for name, parameter in module.named_parameters():
            self.note(name, parameter)
        self.verify("values", f"{by} has changed it by what this rank alone has computed")


def _disagree(one: tuple[str, float, float], other: tuple[str, float, float]) -> bool:
    if one[0] != other[0]:
        return True
    if not all(map(math.isfinite, (*one[1:], *other[1:]))):
        return False  # a gradient scaler leaves out this step
    return max(abs(one[1] - other[1]), abs(one[2] - other[2])) > _TOLERANCE * max(one[1], other[1])


def _sample(tensor: Tensor) -> str:
    """A digest of some elements of a tensor."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return ""
    flat = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _SAMPLED)]
    return _digest(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
