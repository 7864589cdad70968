"""Call torch's backward, `zero_grad` and optimizer step without their wrappers where the wrappers have no effect.

On a tiny model the wrappers cost more than the work: they record profiler events without a profiler, look for hooks
that are not registered, and guard against a compiler that does not run. Each function here does the same as torch's
own, and falls back to torch's own if a profiler, a hook or a patch is present.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind not in (Optimizer, torch.optim.LBFGS)
]
_INNERMOST: dict[type, Any] = {kind: inspect.unwrap(kind.step) for kind in _OPTIMIZERS}
_ZERO_GRAD = Optimizer.zero_grad
_BACKWARD = (Tensor.backward, torch.autograd.backward)


def backward_of() -> Callable[[Tensor], None]:
    """Choose how to run backward: directly, or by `loss.backward()` if that was patched."""
    return _backward if (Tensor.backward, torch.autograd.backward) == _BACKWARD else Tensor.backward


def _backward(loss: Tensor) -> None:
    if type(loss) is not Tensor or loss.dim() or not loss.requires_grad or not loss.is_floating_point():
        loss.backward()  # raises torch's own error
        return
    _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class PlainOptimizer:
    """Steps and clears one of torch's optimizers.

    Args:
        optimizer: any optimizer; `steps_plainly` tells whether this class supports its methods.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer: Any = optimizer
        kind, patched = type(optimizer), vars(optimizer).get("step")
        # torch's learning rate schedulers count calls with a wrapper on the instance
        self._counts = getattr(patched, "_wrapped_by_lr_sched", None) is True
        known = kind in _INNERMOST and inspect.unwrap(kind.step) is _INNERMOST[kind]
        has_hooks = optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
        clears = kind.zero_grad is _ZERO_GRAD and "zero_grad" not in vars(optimizer)
        self.steps_plainly = known and clears and (patched is None or self._counts) and not has_hooks
        self._step: Any = getattr(kind.step, "__wrapped__", None)

    def step(self) -> None:
        """Update the parameters like `optimizer.step()`; valid only if `steps_plainly`."""
        optimizer = self.optimizer
        if (
            optimizer._optimizer_step_post_hooks
            or _global_optimizer_post_hooks
            or optimizer._optimizer_step_pre_hooks
            or _global_optimizer_pre_hooks
            or torch.autograd._profiler_enabled()
        ):
            optimizer.step()
            return
        if self._counts:
            optimizer._opt_called = True
        self._step(optimizer)

    def zero_grad(self) -> None:
        """Reset the gradients like `optimizer.zero_grad()`; valid only if `steps_plainly`."""
        optimizer = self.optimizer
        if torch.autograd._profiler_enabled():
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
