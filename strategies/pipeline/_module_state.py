"""Find out whether the micro-batches of a module may alternate.

Micro-batches that alternate at the boundaries of stages would mix what a step keeps on the module from one layer to the
next: a list of features, a flag or `requires_grad` for some calls, parameters that `functional_call` swaps. So the
first micro-batch of a run is watched. If it has changed anything where it enters another stage, or at its end, or is
then in a block that is not its own (forward differentiation, or a checkpointed function that draws random numbers,
which it is to draw again), micro-batches run one after the other. So do those of a module with hooks, which may keep
anything anywhere.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, get_rng_state, nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle
from torchmetrics import MetricCollection

from ..batch.exact.loss_reader import Part
from ..core.module_checks import is_metric
from ..core.patching import LIGHTNING_KEYS, hooks_of
from .stages import Stages

_LIGHTNING = LIGHTNING_KEYS - {"training"}


class ModuleState:
    """What tells whether a step has changed buffers, attributes, children or parameters of a module.

    Args:
        module: the placed module; torchmetrics' metrics in it are left out, and statistics of BatchNorm.
        stages: where it is placed, by hooks of its own.
    """

    def __init__(self, module: nn.Module, stages: Stages) -> None:
        self._stages = stages
        self._parts = [part for part in module.modules() if not (is_metric(part) or isinstance(part, MetricCollection))]
        self._spaces = [space for part in self._parts for space in (vars(part), part._modules, part._parameters)]
        # micro-batches update statistics of BatchNorm one by one
        self._spaces += [part._buffers for part in self._parts if not isinstance(part, _BatchNorm)]
        self.is_known = False
        """Whether the first micro-batch was watched."""
        self._keeps = False
        self._num_hooks = -1

    def may_alternate(self) -> bool:
        """Whether micro-batches may be on different stages at the same time, as far as is known."""
        if self.is_known and not self._keeps and _num_hooks() != self._num_hooks:
            own, self._num_hooks = {hook.id for hook in self._stages.hooks}, _num_hooks()
            self._keeps = not own.issuperset(n for part in self._parts for hooks in hooks_of(part) for n in hooks)
        return self.is_known and not self._keeps

    def watch(self, step: Callable[[], Any]) -> Any:
        """Run the first micro-batch of a run, and look whether others could come in between."""
        held = [list(space.values()) for space in self._spaces]  # so that no other object gets the number of one
        first, random_state, draws_again = self._state(), get_rng_state(), False

        def look(stage: int = 0) -> None:
            nonlocal draws_again
            self._keeps |= forward_ad._current_level >= 0 or self._state() != first
            inside: Any = torch._C
            saves_no_tensors = inside._autograd._top_saved_tensors_default_hooks(False) is not None
            draws_again |= saves_no_tensors or not torch.is_grad_enabled()

        with self._stages.entering(look):
            output = step()
        look()
        self._keeps |= draws_again and not torch.equal(random_state, get_rng_state())
        self.is_known = True
        held.clear()
        return output

    def _state(self) -> list[Any]:
        """What is another if a step has set anything."""
        watched = ((key, value) for space in self._spaces for key, value in space.items() if key not in _LIGHTNING)
        return [_num_hooks(), *((key, *_mark(value)) for key, value in watched)]


def _num_hooks() -> int:
    """How many hooks were registered on modules and parameters."""
    return RemovableHandle.next_id - Part.num_hooks


def _mark(value: Any) -> tuple[Any, ...]:
    """What is another if a value was replaced, or written to."""
    if isinstance(value, Tensor):
        return id(value), value.requires_grad, 0 if value.is_inference() else value._version
    return id(value), len(value) if isinstance(value, (list, dict, set, deque)) else 0
