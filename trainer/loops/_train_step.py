"""Run one training step with automatic optimization: forward, backward, optimizer, in Lightning's order.

    training_step → on_before_zero_grad → optimizer_zero_grad → on_before_backward → backward → on_after_backward
    → on_before_optimizer_step → configure_gradient_clipping → the optimizer's own update

As in Lightning all of it runs inside `optimizer.step(closure)`, so that optimizers which call the closure several times
or never also work; most of torch's optimizers call it once at the start and need no closure. Overrides of the module,
strategy or precision plugin are called as in Lightning; everything that is not overridden is done here directly.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning_fabric.utilities.types import Optimizable
from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.utilities.enums import GradClipAlgorithmType
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from ...strategies.batch.losses import FOUND
from ...strategies.core.loop_contract import NothingToDo
from ...strategies.core.types import Batch
from ._batch_fetch import batch_mover
from ._hook_plan import MODULE, PRECISION, STRATEGY, HookPlan, any_overridden, overridden
from ._torch_fast_path import PlainOptimizer, backward_of
from .accumulation import Accumulation

_OPTIMIZER_STEP = LightningOptimizer.step
_MIXED = {name: getattr(MixedPrecision, name) for name in ("pre_backward", "optimizer_step")}


class TrainStep:
    """The lean training step; choices that do not change from step to step are made once.

    Args:
        automatic: Lightning's loop for automatic optimization, which owns the counters.
        accumulation: weights of micro-batches.
    """

    def __init__(self, plan: HookPlan, automatic: _AutomaticOptimization, accumulation: Accumulation) -> None:
        self.plan = plan
        self.trainer = plan.trainer
        self.automatic = automatic
        self.accumulation = accumulation
        self.resolve()

    def resolve(self) -> None:
        """Resolve the plan and make all choices again."""
        plan = self.plan
        plan.resolve()
        module, strategy, precision, contract = plan.module, plan.strategy, plan.precision, plan.contract
        self.contract = contract
        self.move = batch_mover(plan)
        self.tells_strategy = overridden(strategy, "on_train_batch_start", STRATEGY)
        self.is_lean = not strategy.handles_gradient_accumulation and len(strategy.optimizers) == 1
        self.forward = (module if plan.step_is_the_modules("training_step") else strategy).training_step
        self.takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self.post_training_step = overridden(strategy, "post_training_step", STRATEGY)
        self.reads_outputs = plan.reads_outputs()
        # with no optimizer, or several, no lean step is taken
        plain: Any = PlainOptimizer(strategy.optimizers[0]) if strategy.optimizers else None
        self.optimizer, optimizer = plain, None if plain is None else plain.optimizer
        self.module_zero_grad = overridden(module, "optimizer_zero_grad", MODULE)
        self.bring_back = module.backward if overridden(module, "backward", MODULE) else backward_of()
        hooked = {"on_before_backward", "on_after_backward"} & plan.work.keys() or not isinstance(contract, NothingToDo)
        self.backward: Callable[[Tensor], object] = self._backward if hooked else self.bring_back
        if not _knows_backward(plan):
            self.backward = lambda loss: strategy.backward(loss, optimizer)
        self.hooks_only = _knows_optimizer_step(plan) and not overridden(module, "optimizer_step", MODULE)
        self.hooks_only = self.hooks_only and optimizer is not None and not contract.changes_update(optimizer)
        self.plain_optimizer_step = plain is not None and self.hooks_only and plain.steps_plainly
        self.clips_itself = any_overridden(module, ("configure_gradient_clipping", "clip_gradients"), MODULE)
        self.clips_itself |= any_overridden(precision, ("_clip_gradients", "clip_gradients"), PRECISION)
        self.hooked_update = self.clips_itself or "on_before_optimizer_step" in plan.work
        self.blocks_sync = isinstance(strategy, ParallelStrategy)
        self.knows_sync = self.blocks_sync and plan.keeps_contract("block_backward_sync")

    def run(self, batch: Batch, batch_idx: int, stepping: bool) -> dict[str, Any]:
        """Run a step on one micro-batch.

        Args:
            stepping: whether the optimizer updates the parameters now, or gradients are only accumulated.

        Returns:
            The outputs for `on_train_batch_end`: the detached loss and everything else that `training_step` returned.
            Empty if it returned None.
        """
        if self.optimizer.optimizer is not self.plan.strategy.optimizers[0]:
            self.resolve()
        if not stepping:
            return self._accumulate(batch, batch_idx)
        step: Any = self.automatic.optim_progress.optimizer.step
        step.total.ready += 1
        step.current.ready += 1
        if self.plain_optimizer_step and torch.is_grad_enabled():
            reported = self._forward_backward(batch, batch_idx, True)
            if self.hooked_update or self.trainer.gradient_clip_val:
                self._before_update(self.optimizer.optimizer)
            self.optimizer.step()
            self.contract.finish_step()
        else:
            reported = self._step_with_closure(batch, batch_idx)
        step.total.completed += 1
        step.current.completed += 1
        return reported

    def _accumulate(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self._accumulate(batch, batch_idx)
        if not self.blocks_sync:
            return self._forward_backward(batch, batch_idx, False)
        strategy: Any = self.plan.strategy
        seen = "on_after_backward" in self.plan.work
        with self.contract.accumulating(seen) if self.knows_sync else strategy.block_backward_sync():
            return self._forward_backward(batch, batch_idx, False)

    def _step_with_closure(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Let the optimizer call forward and backward, through any overrides of its step."""
        plan = self.plan
        results: list[dict[str, Any]] = []

        def forward_backward() -> ClosureResult:
            results[:] = [self._forward_backward(batch, batch_idx, True)]
            return ClosureResult(results[0].get("loss"))

        # Lightning's type, since user code may check for it; it enables gradients and returns the loss
        closure = Closure(step_fn=forward_backward)
        epoch, optimizer = self.trainer.current_epoch, plan.strategy._lightning_optimizers[0]
        if self.hooks_only:
            raw: Any = optimizer._optimizer

            def closure_then_hooks() -> Tensor | None:
                loss = closure()
                self._before_update(raw)
                return loss

            raw.step(closure=closure_then_hooks)
            self.contract.finish_step()
        else:
            plan.call_as("optimizer_step", plan.module.optimizer_step, epoch, batch_idx, optimizer, closure)
        closure.consume_result()  # raises if the closure was never called
        return results[0]

    def _forward_backward(self, batch: Batch, batch_idx: int, stepping: bool) -> dict[str, Any]:
        plan, state, parts = self.plan, self.plan.state, self.trainer.accumulate_grad_batches
        args = (batch, batch_idx) if self.takes_index else (batch,)
        before = state["_current_fx_name"]
        state["_current_fx_name"] = "training_step"
        output = self.forward(*args)
        state["_current_fx_name"] = before
        if self.post_training_step:
            plan.strategy.post_training_step()
        if plan.stale():
            self.resolve()
        first = parts == 1 or batch_idx % parts == 0
        if output is None:
            return self._skip(batch_idx, first)
        loss, others = (output, {}) if isinstance(output, Tensor) else self._split(output)
        exact = parts != 1 and self.accumulation.exact
        if parts != 1 and not exact:
            loss = loss / parts
        # a copy, since precision plugins and hooks may scale it in place
        reported = {"loss": loss.detach().clone() if self.reads_outputs else loss.detach(), **others}
        if exact:
            if first:
                self.accumulation.start()
            loss = self.accumulation.weigh(loss, output, batch)
        del output, others
        if first:
            self._zero_grad(batch_idx)
        state["_current_fx_name"] = "backward"
        self.backward(loss)
        state["_current_fx_name"] = before
        if stepping and exact:
            self.accumulation.divide_gradients()
        return reported

    def _skip(self, batch_idx: int, first: bool) -> dict[str, Any]:
        """Finish a step whose `training_step` returned None."""
        if self.trainer.world_size > 1:
            raise RuntimeError(
                "Skipping the `training_step` by returning None in distributed training is not supported: the other "
                "ranks would wait for this rank's gradients. Return a loss on every rank, zero if there is nothing to "
                "train on."
            )
        automatic: Any = self.automatic
        automatic.num_none += 1
        zero_grad = (lambda: self._zero_grad(batch_idx)) if first else None
        Closure(step_fn=lambda: ClosureResult(None), zero_grad_fn=zero_grad)()  # warns
        return {}

    def _split(self, output: Any) -> tuple[Tensor, dict[str, Any]]:
        """Split the output of `training_step` into the loss and the other outputs for hooks."""
        if not isinstance(output, Mapping) or output.get("loss") is None:
            ClosureResult.from_training_step_output(output)
            raise AssertionError("Lightning refuses an output without a loss")
        return output["loss"], {key: value for key, value in output.items() if key not in ("loss", FOUND)}

    def _zero_grad(self, batch_idx: int) -> None:
        plan, optimizer = self.plan, self.optimizer.optimizer
        counter: Any = self.automatic.optim_progress.optimizer.zero_grad
        total, current = counter.total, counter.current
        total.ready += 1
        current.ready += 1
        if "on_before_zero_grad" in plan.work:
            plan.call("on_before_zero_grad", optimizer)
        total.started += 1
        current.started += 1
        if self.module_zero_grad:
            epoch = self.trainer.current_epoch
            plan.call_as("optimizer_zero_grad", plan.module.optimizer_zero_grad, epoch, batch_idx, optimizer)
        else:
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

    def _before_update(self, optimizer: Optimizable) -> None:
        """Call the hooks between backward and the optimizer's update, and clip."""
        plan, trainer = self.plan, self.trainer
        if "on_before_optimizer_step" in plan.work:
            plan.call("on_before_optimizer_step", optimizer)
        value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm or GradClipAlgorithmType.NORM
        if not self.clips_itself and type(value) in (int, float) and type(algorithm) is GradClipAlgorithmType:
            plan.precision.clip_gradients(optimizer, value, algorithm)
        elif value or self.clips_itself:
            # Lightning's own method, for its checks of value and algorithm
            plan.precision._clip_gradients(
                plan.module, optimizer, value, gradient_clip_algorithm=trainer.gradient_clip_algorithm
            )


def _knows_backward(plan: HookPlan) -> bool:
    """Whether the strategy's backward is hooks, the module's backward and the contract's methods."""
    own = any_overridden(plan.precision, ("backward", "post_backward"), PRECISION) or _scales(plan, "pre_backward")
    return plan.keeps_contract("backward", "pre_backward", "post_backward") and not own


def _knows_optimizer_step(plan: HookPlan) -> bool:
    """Whether the strategy's optimizer step is the optimizer's own, hooks, and the contract's `finish_step`."""
    strategy: Any = plan.strategy
    own = any_overridden(plan.precision, ("_wrap_closure", "_after_closure"), PRECISION)
    own = own or _scales(plan, "optimizer_step") or getattr(strategy, "_model_averager", None) is not None
    patched = any(type(optimizer).step is not _OPTIMIZER_STEP for optimizer in strategy._lightning_optimizers)
    return plan.keeps_contract("optimizer_step") and not (own or patched)


def _scales(plan: HookPlan, name: str) -> bool:
    """Whether the precision plugin has an own method, not that of bfloat16, which has no gradient scaler."""
    precision: Any = plan.precision
    mixes_only = not overridden(precision, name, _MIXED) and precision.scaler is None
    return overridden(precision, name, PRECISION) and not mixes_only
