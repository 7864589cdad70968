"""What torch's optimizers leave open: where their state is, and what happens right before they update parameters."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def unwrapped(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """The optimizer inside Lightning's wrapper, which `LightningModule.optimizers()` returns."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def load_states(optimizers: Iterable[Optimizer], checkpoint: Mapping[str, Any]) -> None:
    """Load states from a checkpoint, each to the device of its parameter; Lightning moves all to the root device."""
    for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
        optimizer.load_state_dict(state)
        state_to_parameters(optimizer)


def state_to_parameters(optimizer: Optimizer) -> None:
    """Move each tensor of an optimizer's state to the device of its parameter; scalars stay where they are."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[key] = value.to(parameter.device)


def before_update(optimizer: Optimizer, call: Callable[[], None]) -> RemovableHandle:
    """Call a function right before an optimizer updates parameters: after its closure, which computes gradients."""

    def hook(_: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        (this, *rest), options = args, dict(kwargs)
        closure: Callable[[], Any] | None = rest[0] if rest else options.get("closure")
        if closure is None:
            call()
            return args, kwargs

        def evaluated() -> Any:
            loss = closure()
            call()
            return loss

        return (this,), {**options, "closure": evaluated}

    return optimizer.register_step_pre_hook(hook)
