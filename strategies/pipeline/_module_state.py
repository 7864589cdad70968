"""Find out whether the micro-batches of a module may alternate.

What a step does to the module is done once per micro-batch, by one after the other. A module that is left otherwise
than by a step of the whole batch (with a buffer that counts, or an estimate of spectral norm) gets whole batches, see
`batch/exact/verifier.py`. Hooks that each micro-batch registers are refused: they would be called several times.

Micro-batches that alternate at the boundaries of stages would mix what a step keeps on the module from one layer to the
next: a list of features, a flag or `requires_grad` for some calls, parameters that `functional_call` swaps. So the
first micro-batch of a run is watched. If it has changed anything where it enters another stage, or at its end, or is
then in a block that is not its own (a transform of `torch.func`, forward differentiation, cached parametrizations, or a
checkpointed function that draws random numbers, which it is to draw again), micro-batches run one after the other. So
do those of a module with hooks, which may keep anything anywhere.
"""

import math
from collections import deque
from collections.abc import Collection, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, get_rng_state, nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torchmetrics import MetricCollection
from typing_extensions import override

from ..batch.exact.plans import Part
from ..core.errors import ConfigError
from ..core.module_checks import is_compiled, is_metric
from ..core.module_state import LIGHTNING_KEYS
from ..core.patching import hooks_of, replaced

_LIGHTNING = LIGHTNING_KEYS - {"training"}
_READ: Any = getattr(Tensor.grad, "__get__")  # noqa: B009  # typed as the tensor that it returns


class ModuleState:
    """What tells whether a step has changed buffers, attributes, children or parameters of a module.

    Args:
        module: the placed module; torchmetrics' metrics in it are left out, and statistics of BatchNorm.
        own_hooks: numbers of hooks that the strategy has registered.
    """

    def __init__(self, module: nn.Module, own_hooks: Collection[int]) -> None:
        self._module = module
        self._parts = [part for part in module.modules() if not (is_metric(part) or isinstance(part, MetricCollection))]
        self._spaces = [space for part in self._parts for space in (vars(part), part._modules, part._parameters)]
        # micro-batches update statistics of BatchNorm one by one
        self._spaces += [part._buffers for part in self._parts if not isinstance(part, _BatchNorm)]
        self._own_hooks = set(own_hooks)
        self.is_known = False
        """Whether the first micro-batch was watched."""
        self.reads_gradients = False
        """Whether it read `.grad` of a parameter."""
        self.nests_backward: bool | None = None
        """Whether its backward pass ran others within itself (`torch.utils.checkpoint` with `use_reentrant=True`),
        which add to the gradient of a parameter one by one; None before it."""
        self._keeps = False
        self._draws_again = False
        self._first: list[Any] = []
        """What tells the state with which the watched micro-batch began."""
        self._num_hooks = -1
        self._next_hook: float = math.inf
        """The lowest number of a hook that a micro-batch after the first can have registered."""

    def may_alternate(self) -> bool:
        """Whether micro-batches may be on different stages at the same time, as far as is known."""
        if self.is_known and not self._keeps and _num_hooks() != self._num_hooks:
            self._num_hooks, self._keeps = _num_hooks(), self._has_hooks()
        return self.is_known and not self._keeps

    @contextmanager
    def step(self) -> Generator[None]:
        """Run the micro-batches of a step inside the block; those after the first may leave no hooks."""
        self._next_hook = math.inf
        yield
        if RemovableHandle.next_id <= self._next_hook:
            return
        for name, owner in (*self._module.named_modules(), *self._module.named_parameters()):
            if any(isinstance(n, int) and n >= self._next_hook for hooks in hooks_of(owner) for n in hooks):
                raise ConfigError(
                    f"training_step registers a hook on {name or type(owner).__name__} in every micro-batch, and they "
                    "would all be called. Register it in __init__, setup, on_fit_start or on_train_batch_start, or "
                    "remove it in the step."
                )

    @contextmanager
    def microbatch(self, number: int) -> Generator[None]:
        """Run a micro-batch of a step inside the block, in their order."""
        if number == 1:
            self._next_hook = RemovableHandle.next_id
        with nullcontext() if number or self.is_known else self._watched():
            yield

    @contextmanager
    def watching_backward(self) -> Generator[None]:
        """Run the first backward pass of a run inside the block."""
        num_begun, own = list[int](), torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            num_begun.append(1)
            own(*args, **kwargs)

        with replaced(torch.autograd, "backward", backward):
            yield
        self.nests_backward = len(num_begun) > 1

    def look(self, stage: int = 0) -> None:
        """Learn, in the watched micro-batch, that others could come in between now."""
        in_block = torch._C._are_functorch_transforms_active() or parametrize._cache_enabled
        self._keeps |= bool(in_block) or forward_ad._current_level >= 0 or self._state() != self._first
        inside: Any = torch._C
        self._draws_again |= (
            not torch.is_grad_enabled() or inside._autograd._top_saved_tensors_default_hooks(False) is not None
        )

    @contextmanager
    def _watched(self) -> Generator[None]:
        # until the end, so that no other object can have the number of one of them
        held = [list(space.values()) for space in self._spaces]
        self._first, random_state = self._state(), get_rng_state()
        with nullcontext() if is_compiled(self._module) else _GradientReads() as reads:
            yield
        self.look()
        self._keeps |= self._has_hooks() or (self._draws_again and not torch.equal(random_state, get_rng_state()))
        self.is_known, self.reads_gradients = True, reads is not None and reads.found
        self._num_hooks, self._first = _num_hooks(), []
        held.clear()

    def _state(self) -> list[Any]:
        """What is another if a step has set anything."""
        watched = ((key, value) for space in self._spaces for key, value in space.items() if key not in _LIGHTNING)
        return [_num_hooks(), *((key, *_mark(value)) for key, value in watched)]

    def _has_hooks(self) -> bool:
        return not self._own_hooks.issuperset(n for part in self._parts for hooks in hooks_of(part) for n in hooks)


class _GradientReads(TorchFunctionMode):
    """Notes whether `.grad` of a parameter is read."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func == _READ and isinstance(args[0], nn.Parameter)
        return func(*args, **(kwargs or {}))


def _num_hooks() -> int:
    """How many hooks were registered on modules and parameters."""
    return RemovableHandle.next_id - Part.num_hooks


def _mark(value: Any) -> tuple[Any, ...]:
    """What is another if a value was replaced, or written to."""
    if isinstance(value, Tensor):
        return id(value), value.requires_grad, 0 if value.is_inference() else value._version
    return id(value), len(value) if isinstance(value, (list, dict, set, deque)) else 0
