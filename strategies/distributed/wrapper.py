"""Work with torch's DistributedDataParallel wrapper: run a step inside its forward, and track what it reduces.

The wrapper reduces the parameters that required gradients when it was created. A parameter unfrozen later would be
trained by each rank separately, and the wrapper would wait for one frozen later.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..core.patching import replaced

_IS_TRAINED = attrgetter("requires_grad")


def verify_reduced(model: DistributedDataParallel) -> None:
    """Raise torch's error about parameters without a gradient now, before an optimizer step uses the others'.

    Without it the error comes in the next forward, after a step with gradients that were not averaged over the ranks.
    """
    if model.require_backward_grad_sync:
        model.reducer._rebuild_buckets()  # what the next forward begins with


def forward_through(wrapper: DistributedDataParallel, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a step in the place of the wrapped module's forward; the step itself may call that.

    Args:
        step: a step of the wrapped module, a LightningModule.
        *args: arguments of the step, passed through the wrapper.
        **kwargs: keyword arguments of the step, likewise.

    Returns:
        What the wrapper makes of the step's output.
    """
    args, kwargs = wrapper._pre_forward(*args, **kwargs)
    if wrapper.mixed_precision is not None:
        wrapper._root_copy_hook()  # a hook of the module's forward
    with wrapper._inside_ddp_forward():
        output = step(*args, **kwargs)
    module: Any = wrapper.module
    if module.automatic_optimization:
        return wrapper._post_forward(output)
    with replaced(wrapper, "require_backward_grad_sync", False):  # each `manual_backward` prepares a reduction
        return wrapper._post_forward(output)


class ReducedParameters:
    """Records the parameters of a module at the time it was wrapped."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._others = [parameter for parameter in self._parameters if not parameter.requires_grad]
        self._num_optimized: list[int] = []
        self.reduced = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        """Names and parameters that are reduced, in the wrapper's order."""

    def changed(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether a parameter was frozen, unfrozen, or given to an optimizer after the module was wrapped."""
        return not all(map(_IS_TRAINED, self._trained)) or self.unfrozen() or self._has_new(optimizers)

    def unfrozen(self) -> bool:
        """Whether a parameter that was frozen when the module was wrapped now requires a gradient."""
        return any(map(_IS_TRAINED, self._others))

    def frozen(self) -> list[nn.Parameter]:
        """The parameters that required a gradient when the module was wrapped, and no longer do."""
        return [parameter for parameter in self._trained if not parameter.requires_grad]

    def _has_new(self, optimizers: Sequence[Optimizer]) -> bool:
        num = [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        if num == self._num_optimized:
            return False
        self._num_optimized = num
        known = {id(parameter) for parameter in self._parameters}
        groups = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
        return any(id(parameter) not in known for group in groups for parameter in group)


def unwrap(wrapper: DistributedDataParallel) -> nn.Module:
    """Take a module out of its wrapper and detach the reducer from its parameters at once."""
    state: Any = wrapper
    # both hold the reducer, which keeps its hooks on the parameters as long as it exists
    state.reducer = state.logger = None
    return wrapper.module
