"""Run one training step with automatic optimization: forward, backward, optimizer, in Lightning's order.

    training_step → on_before_zero_grad → zero_grad → on_before_backward → backward → on_after_backward
    → on_before_optimizer_step → configure_gradient_clipping → the optimizer's own update

That is what Lightning's step comes to where nobody overrides more than `backward`, clipping and the hooks: with one of
torch's optimizers, which compute the gradients once before they update, a precision plugin without a gradient scaler,
and a strategy whose methods are Lightning's and the contract's. Every other step is Lightning's own.

torch's backward, `zero_grad` and optimizer step are called without their wrappers, which cost more than the work on a
tiny model: they record profiler events without a profiler, look for hooks that are not registered, and guard against a
compiler that does not run. Each function here does the same, and falls back to torch's own if one of these is present.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.loops.fetchers import _DataFetcher
from pytorch_lightning.loops.optimization.automatic import Closure, ClosureResult
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.utilities.enums import GradClipAlgorithmType
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ...strategies.batch.results import loss_and_others
from ...strategies.core.loop_contract import NothingToDo
from ...strategies.core.types import Batch
from ._batch_fetch import OneLoader, batch_mover
from .accumulation import AccumulatingOptimization
from .hook_plan import MODULE, PRECISION, STRATEGY, HookPlan, any_overridden, overridden

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
    """Steps and clears one of torch's optimizers, if `steps_plainly` says that it can."""

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


_OPTIMIZER_STEP = LightningOptimizer.step
_MIXED = {name: getattr(MixedPrecision, name) for name in ("pre_backward", "optimizer_step")}
_OF_PRECISION = ("backward", "post_backward", "_wrap_closure", "_after_closure")
_OF_STRATEGY = ("backward", "pre_backward", "post_backward", "optimizer_step")


class TrainStep:
    """The lean training step; choices that do not change from step to step are made once."""

    optimizer: PlainOptimizer

    def __init__(
        self,
        plan: HookPlan,
        loader: OneLoader | _DataFetcher,
        automatic: AccumulatingOptimization,
    ) -> None:
        self.plan = plan
        # Lightning's fetcher also returns the indices of the batch and of the loader
        self.next_batch = loader.__next__ if isinstance(loader, OneLoader) else lambda: next(loader)[0]
        self.trainer = plan.trainer
        self.automatic = automatic
        self.resolve()

    def resolve(self) -> None:
        """Resolve the plan and make all choices again."""
        plan = self.plan
        plan.resolve()
        module, strategy, precision, contract = plan.module, plan.strategy, plan.precision, plan.contract
        self.contract = contract
        self.move = batch_mover(plan)
        self.tells_strategy = overridden(strategy, "on_train_batch_start", STRATEGY)
        self.is_lean = len(strategy.optimizers) == 1 and _is_known(plan)
        if self.is_lean:
            self.optimizer = PlainOptimizer(strategy.optimizers[0])
            self.is_lean = self.optimizer.steps_plainly and not contract.changes_update(strategy.optimizers[0])
        self.forward = (module if plan.step_is_the_modules("training_step") else strategy).training_step
        self.takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self.reads_outputs = plan.reads_outputs()
        self.bring_back = module.backward if overridden(module, "backward", MODULE) else backward_of()
        hooked = {"on_before_backward", "on_after_backward"} & plan.work.keys()
        self.hooked_backward = bool(hooked) or not isinstance(contract, NothingToDo)
        self.clips_itself = any_overridden(module, ("configure_gradient_clipping", "clip_gradients"), MODULE)
        self.clips_itself |= any_overridden(precision, ("_clip_gradients", "clip_gradients"), PRECISION)
        self.hooked_update = self.clips_itself or "on_before_optimizer_step" in plan.work

    def fits(self) -> bool:
        """Whether the next step may be lean."""
        optimizers = self.plan.strategy.optimizers
        if self.is_lean and self.optimizer.optimizer is not optimizers[0]:
            self.resolve()
        return self.is_lean and torch.is_grad_enabled()

    def run(self, batch: Batch, batch_idx: int, stepping: bool) -> dict[str, Any]:
        """Run a step on one micro-batch; only if it is `stepping`, the optimizer updates the parameters.

        Returns:
            The outputs for `on_train_batch_end`: the detached loss and everything else that `training_step` returned.
            Empty if it returned None.
        """
        step: Any = self.automatic.optim_progress.optimizer.step
        if stepping:
            step.total.ready += 1
            step.current.ready += 1
            reported = self._forward_backward(batch, batch_idx)
            if self.trainer.accumulate_grad_batches != 1 and self.automatic.exact:
                self.automatic.divide_gradients()
            if self.hooked_update or self.trainer.gradient_clip_val:
                self._before_update()
        else:
            with self.contract.accumulating("on_after_backward" in self.plan.work):
                reported = self._forward_backward(batch, batch_idx)
        sections: Any = self.trainer.fit_loop.sections  # pyright: ignore[reportAttributeAccessIssue]  # of our loop
        if sections is not None:
            sections.count()
        if stepping:
            self.optimizer.step()
            self.contract.finish_step()
            step.total.completed += 1
            step.current.completed += 1
        return reported

    def _forward_backward(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        plan = self.plan
        args = (batch, batch_idx) if self.takes_index else (batch,)
        output = plan.call_as("training_step", self.forward, *args)
        if plan.stale():
            self.resolve()
        if output is None or self.trainer.accumulate_grad_batches != 1:
            loss, reported = self.automatic.read(output, batch, batch_idx, self.reads_outputs)
        else:
            loss, others = loss_and_others(output)
            reported = {"loss": loss.detach().clone() if self.reads_outputs else loss.detach(), **others}
        del output
        first = batch_idx % self.trainer.accumulate_grad_batches == 0
        if loss is None:
            Closure(lambda: ClosureResult(None), zero_grad_fn=self._zero_grad if first else None)()  # warns
            return reported
        if first:
            self._zero_grad()
        plan.call_as("backward", self._backward if self.hooked_backward else self.bring_back, loss)
        return reported

    def _zero_grad(self) -> None:
        counter: Any = self.automatic.optim_progress.optimizer.zero_grad
        total, current = counter.total, counter.current
        total.ready += 1
        current.ready += 1
        if "on_before_zero_grad" in self.plan.work:
            self.plan.call("on_before_zero_grad", self.optimizer.optimizer)
        total.started += 1
        current.started += 1
        self.optimizer.zero_grad()
        total.completed += 1
        current.completed += 1

    def _backward(self, loss: Tensor) -> None:
        plan = self.plan
        if "on_before_backward" in plan.work:
            plan.call("on_before_backward", loss)
        loss = self.contract.scale_loss(loss)
        self.bring_back(loss)
        self.contract.finish_backward()
        if "on_after_backward" in plan.work:
            plan.call("on_after_backward")

    def _before_update(self) -> None:
        """Call the hooks between backward and the optimizer's update, and clip."""
        plan, optimizer = self.plan, self.optimizer.optimizer
        value = self.trainer.gradient_clip_val
        algorithm = self.trainer.gradient_clip_algorithm or GradClipAlgorithmType.NORM
        if "on_before_optimizer_step" in plan.work:
            plan.call("on_before_optimizer_step", optimizer)
        if type(value) in (int, float) and isinstance(algorithm, GradClipAlgorithmType) and not self.clips_itself:
            plan.precision.clip_gradients(optimizer, value, algorithm)
        elif value or self.clips_itself:  # Lightning's own method, for its checks of value and algorithm
            plan.precision._clip_gradients(
                plan.module, optimizer, value, gradient_clip_algorithm=self.trainer.gradient_clip_algorithm
            )


def _is_known(plan: HookPlan) -> bool:
    """Whether all that a step calls beside its hooks is Lightning's and the contract's part."""
    strategy, precision = plan.strategy, plan.precision
    mixes_only = not any_overridden(precision, _MIXED, _MIXED) and precision.scaler is None  # as with bfloat16
    blocks_sync = ("block_backward_sync",) if isinstance(strategy, ParallelStrategy) else ()
    return (
        plan.keeps_contract(*_OF_STRATEGY, *blocks_sync)
        and not overridden(strategy, "post_training_step", STRATEGY)
        and not any_overridden(plan.module, ("optimizer_step", "optimizer_zero_grad"), MODULE)
        and not any_overridden(precision, _OF_PRECISION, PRECISION)
        and (mixes_only or not any_overridden(precision, _MIXED, PRECISION))
        and all(type(optimizer).step is _OPTIMIZER_STEP for optimizer in strategy._lightning_optimizers)
    )
