"""The contract between the loops and this project's strategies: what a strategy does beside Lightning's part.

on_before_backward → scale_loss → the backward pass → finish_backward → on_after_backward
on_before_optimizer_step → clipping → the optimizer's update → finish_step
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class StepContract(Protocol):
    """What a strategy does in a step, and with what a step leaves; every method adds nothing by default."""

    @property
    def meeting_device(self) -> torch.device | None:
        """The device that batches are moved to; None for the root device."""

    def stands_in(self) -> bool:
        """Whether this rank has no samples of the batch that is evaluated, so that nothing of its step may count."""
        return False

    def begin_batch(self, dataloader_idx: int) -> None:
        """Learn that the next batch of a loader was fetched and will be moved to a device."""

    def runs_alone(self, step: str) -> bool:
        """Whether a step (`validation_step`, ...) only calls the module's, in the precision plugin's context."""
        return False

    def accumulating(self, seen: bool) -> AbstractContextManager[Any]:
        """Accumulate gradients on each rank inside the block, unless they are `seen` (by `on_after_backward`)."""
        return nullcontext()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Weight the loss before its backward pass."""
        return loss

    def finish_backward(self) -> None:
        """Complete the gradients after the backward pass of the loss, before `on_after_backward`."""

    def finish_step(self) -> None:
        """Learn that the optimizer has stepped."""

    def changes_update(self, optimizer: Optimizer) -> bool:
        """Whether the strategy's `optimizer_step` does more than the optimizer's own, and then `finish_step`."""
        return False

    def whole_gradients(self, module: nn.Module) -> dict[str, Tensor]:
        """Copy the gradients of an unfinished step to the CPU, by name of the parameter."""
        return {name: p.grad.detach().cpu() for name, p in module.named_parameters() if p.grad is not None}

    def restore_gradients(self, module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
        """Set the gradients that `whole_gradients` returned."""
        for name, parameter in module.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter)


class NothingToDo(StepContract):
    """The contract of a strategy that adds nothing to Lightning's part."""


def run_backward(self: Any, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
    """Run the backward pass of a loss as Lightning's `Strategy.backward` does, with what the contract adds."""
    module, plugin, contract = self.lightning_module, self.precision_plugin, self.contract
    self.pre_backward(closure_loss)
    loss = contract.scale_loss(plugin.pre_backward(closure_loss, module))
    plugin.backward(loss, module, optimizer, *args, **kwargs)
    contract.finish_backward()  # before `on_after_backward`, which may read the gradients
    loss = plugin.post_backward(loss, module)
    self.post_backward(loss)
    return loss


def evaluation_step(stage: str) -> Any:
    """Make the method of a strategy that runs a step of evaluation: `val`, `test` or `predict`."""
    step, context = f"{'validation' if stage == 'val' else stage}_step", f"{stage}_step_context"

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.contract.evaluate(step, getattr(self.precision_plugin, context), *args, **kwargs)

    return run


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
