"""Find out, in its first micro-batch, what a module's step shares with the steps of other micro-batches.

Micro-batches in threads call the same module in turns that change at every stage. What a step keeps there from one
layer to the next (features that a forward hook collects, a loss that `forward` appends to a list, hooks that the step
itself registers, parameters that `functional_call` swaps, a flag or `requires_grad` that it sets for some calls) would
then be mixed. Such micro-batches run one after the other. So do those that are computed again in backward with the same
random numbers (activation checkpointing of dropout), since all threads share one stream, and those that differentiate
forward, whose levels all threads share as they do cached parametrizations, or call layers in transforms of
`torch.func`, in which turns can't change.
"""

from collections import deque
from collections.abc import Collection, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, get_rng_state, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torchmetrics import MetricCollection
from typing_extensions import override

from ..core.module_checks import is_compiled, is_metric
from ..core.patching import HOOKS, replaced
from ..core.private import of_torch
from ._recomputed_call import is_recomputing
from .schedule import Phase

_HOOKS = tuple(key for key in HOOKS if "state_dict" not in key)
_LIGHTNING = LightningModule().__dict__.keys() - {"training"}
_READ: Any = getattr(Tensor.grad, "__get__")  # noqa: B009  # typed as the tensor that it returns


class KeptState:
    """Watches the first micro-batch of a run, and decides whether micro-batches may run at the same time.

    Args:
        module: the module; torchmetrics' metrics in it are left out.
        own_hooks: numbers of hooks that the strategy has registered.
    """

    def __init__(self, module: nn.Module, own_hooks: Collection[int]) -> None:
        self._root = module
        self._modules = [
            part for part in module.modules() if not (is_metric(part) or isinstance(part, MetricCollection))
        ]
        self._own_hooks = set(own_hooks)
        self._is_compiled = is_compiled(module)
        self._num_hooks = -1
        self.keeps_state = False
        """Whether micro-batches must run one after the other, as far as is known."""
        self._draws = False
        self.reads_gradients = False
        """Whether the step read `.grad` of a parameter."""
        self.nests_backward = False
        """Whether the backward pass runs others within itself (`torch.utils.checkpoint` with `use_reentrant=True`),
        which add to the gradient of a parameter one by one."""

    def must_watch(self) -> bool:
        """Whether nothing is known yet, or hooks were registered since the last look."""
        return not self.keeps_state and RemovableHandle.next_id != self._num_hooks

    def watching(self, phase: Phase) -> AbstractContextManager[Any]:
        """Run a micro-batch alone inside the block, in one direction, and decide by what it does."""
        return self._watching_step() if phase == "F" else self._watching_backward()

    @contextmanager
    def _watching_step(self) -> Generator[None]:
        before = {part: _state(part) for part in self._modules}
        versions = self._versions()
        collections = [value for held in before.values() for key, value in held.items() if _is_collection(key, value)]
        lengths = list(map(len, collections))
        shares: list[bool] = []

        def look_at(part: nn.Module, *_: Any) -> None:
            is_set = any(_differ(before[one], _state(one)) for one in (self._root, part) if one in before)
            is_shared = of_torch.transforms_active() or of_torch.parametrizations_are_cached()
            shares.append(is_set or is_shared or lengths != list(map(len, collections)))

        look = register_module_forward_hook(look_at)
        num_hooks = RemovableHandle.next_id
        random_state, saves = get_rng_state(), list[bool]()

        enter_level = forward_ad.enter_dual_level

        def entered() -> int:
            shares.append(True)
            return enter_level()

        def saved() -> Tensor:  # `torch.utils.checkpoint` does, to draw the same numbers again
            saves.append(True)
            return get_rng_state()

        try:
            with (
                replaced(torch, "get_rng_state", saved),
                replaced(forward_ad, "enter_dual_level", entered),
                nullcontext() if self._is_compiled else _GradientReads() as reads,
            ):
                yield
        finally:
            look.remove()
        self.reads_gradients = reads is not None and reads.found
        self._draws = not torch.equal(random_state, get_rng_state())
        self._num_hooks = RemovableHandle.next_id
        changed = any(_differ(old, _state(part)) for part, old in before.items())
        changed |= versions != self._versions()
        draws_again = self._draws and any(saves)
        self.keeps_state = changed or any(shares) or self._num_hooks != num_hooks or self._has_hooks() or draws_again

    @contextmanager
    def _watching_backward(self) -> Generator[None]:
        """Look whether it computes modules again, but for `strategy.recompute`, or runs passes within itself."""
        called, begun, own = list[bool](), list[bool](), torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            begun.append(True)
            own(*args, **kwargs)

        look = register_module_forward_pre_hook(lambda *_: called.append(not is_recomputing()))
        try:
            with replaced(torch.autograd, "backward", backward):
                yield
        finally:
            look.remove()
            self._num_hooks = RemovableHandle.next_id
        self.nests_backward = len(begun) > 1
        self.keeps_state |= self._draws and any(called)

    def _versions(self) -> list[tuple[int, int]]:
        """What tells whether buffers are written to, but for BatchNorm's, which each micro-batch updates."""
        parts = [part for part in self._modules if not isinstance(part, of_torch.BatchNorm)]
        return [(id(b), b._version) for part in parts for b in part.buffers(recurse=False) if not b.is_inference()]

    def _has_hooks(self) -> bool:
        hooks = (number for part in self._modules for key in _HOOKS for number in part.__dict__.get(key, ()))
        return not self._own_hooks.issuperset(hooks)


class _GradientReads(TorchFunctionMode):
    """Notes whether `.grad` of a parameter is read."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func == _READ and isinstance(args[0], nn.Parameter)
        return func(*args, **(kwargs or {}))


def _state(part: nn.Module) -> dict[str, Any]:
    """What a step may set for some calls of a part: attributes, children, parameters and whether these are trained."""
    trained = {f"{name}.requires_grad": p.requires_grad for name, p in part.named_parameters(recurse=False)}
    return {**part.__dict__, **part._modules, **part._parameters, **trained}


def _is_collection(key: str, value: Any) -> bool:
    return key not in _LIGHTNING and isinstance(value, (list, dict, set, deque))


def _differ(before: dict[str, Any], now: dict[str, Any]) -> bool:
    keys = (before.keys() | now.keys()) - _LIGHTNING
    return any(key not in before or key not in now or before[key] is not now[key] for key in keys)
