"""Which parameters DDP reduces: those that are trained, also after layers were frozen, unfrozen or added.

Torch's wrapper reduces the parameters that required gradients when it was made. One that is unfrozen later would be
trained by each rank alone, and one that is frozen later would be waited for.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class TrainedParameters:
    """The parameters of a module as they were when it was wrapped.

    Args:
        module: the module, about to be wrapped.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._flags = self._read_flags()
        self._num_optimized: list[int] = []
        self.reduced = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        """Names and parameters whose gradients are reduced, in the order in which the wrapper counts them."""

    def changed(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether a parameter was frozen, unfrozen, or given to an optimizer after the module was wrapped."""
        return self._read_flags() != self._flags or self._has_new(optimizers)

    def unfrozen(self) -> bool:
        """Whether a parameter that was frozen when the module was wrapped requires a gradient now."""
        return any(now and not then for now, then in zip(self._read_flags(), self._flags, strict=True))

    def frozen(self) -> list[nn.Parameter]:
        """The parameters that required a gradient when the module was wrapped, and do so no longer."""
        flags = zip(self._parameters, self._flags, strict=True)
        return [parameter for parameter, then in flags if then and not parameter.requires_grad]

    def _read_flags(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def _has_new(self, optimizers: Sequence[Optimizer]) -> bool:
        num = [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        if num == self._num_optimized:
            return False
        self._num_optimized = num
        known = {id(parameter) for parameter in self._parameters}
        return any(id(parameter) not in known for parameter in _optimized(optimizers))


def _optimized(optimizers: Sequence[Optimizer]) -> Iterable[Tensor]:
    return (parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"])


def unwrap(wrapper: DistributedDataParallel) -> nn.Module:
    """Take a module out of its wrapper, whose reducer lets go of the parameters at once."""
    state: Any = wrapper
    # both hold the reducer, whose hooks stay on the parameters as long as it lives
    state.reducer = state.logger = None
    return wrapper.module
