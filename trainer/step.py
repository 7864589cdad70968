"""One training step with automatic optimization: forward, backward, optimizer, in Lightning's order.

    training_step → on_before_zero_grad → optimizer_zero_grad → on_before_backward → backward → on_after_backward
    → on_before_optimizer_step → configure_gradient_clipping → the optimizer's own update

As in Lightning all of it runs inside `optimizer.step(closure)`, so that optimizers which call the closure again, or
never, work. What module, strategy or precision plugin override is called as Lightning calls it; what nobody overrides
is done here directly.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning_fabric.utilities.types import Optimizable
from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import DDPStrategy, ParallelStrategy
from torch import Tensor

from ..strategies.types import Batch
from .accumulation import Accumulation
from .hooks import MODULE, PRECISION, STRATEGY, HookPlan, any_overridden, overridden

_OPTIMIZER_STEP = LightningOptimizer.step
_DDP = {name: getattr(DDPStrategy, name) for name in ("pre_backward", "post_backward", "optimizer_step")}
_MIXED = {name: getattr(MixedPrecision, name) for name in ("pre_backward", "optimizer_step")}


class TrainStep:
    """The lean step, with the choices that do not change from step to step made once.

    Args:
        plan: the hooks that exist.
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
        """Make the choices again, after the plan was resolved again."""
        plan, module, strategy = self.plan, self.plan.module, self.plan.strategy
        self.plain_forward = plan.step_is_the_modules("training_step")
        self.plain_backward = _backward_is_lightnings(plan)
        self.module_backward = overridden(module, "backward", MODULE)
        self.plain_optimizer_step = _optimizer_step_is_lightnings(plan)
        self.module_optimizer_step = overridden(module, "optimizer_step", MODULE)
        self.module_zero_grad = overridden(module, "optimizer_zero_grad", MODULE)
        self.clips_itself = any_overridden(module, ("configure_gradient_clipping", "clip_gradients"), MODULE)
        self.clips_itself |= any_overridden(plan.precision, ("_clip_gradients", "clip_gradients"), PRECISION)
        self.post_training_step = overridden(strategy, "post_training_step", STRATEGY)
        self.blocks_sync = isinstance(strategy, ParallelStrategy)
        self.reads_outputs = plan.reads_outputs()

    def run(self, args: tuple[Any, ...], batch: Batch, batch_idx: int, stepping: bool) -> dict[str, Any]:
        """Do a step on one micro-batch.

        Args:
            args: what `training_step` takes: the batch, perhaps its index.
            batch: the micro-batch.
            batch_idx: its index in the epoch.
            stepping: whether the optimizer updates the parameters now, or gradients are only accumulated.

        Returns:
            What `on_train_batch_end` receives: the loss, detached, and what else `training_step` returned. Empty
            where it returned None.
        """
        results: list[dict[str, Any]] = []
        first = batch_idx % self.trainer.accumulate_grad_batches == 0

        def closure() -> Tensor | None:
            if torch.is_grad_enabled():
                result = self._forward_backward(args, batch, batch_idx, first, stepping)
            else:
                with torch.enable_grad():
                    result = self._forward_backward(args, batch, batch_idx, first, stepping)
            results[:] = [result]
            return result.get("loss")

        if stepping:
            self._optimizer_step(batch_idx, closure)
        elif self.blocks_sync:
            with self.plan.strategy.block_backward_sync():  # type: ignore[attr-defined]
                closure()
        else:
            closure()
        if not results:
            # the same error as Lightning's: an optimizer_step that never called its closure
            Closure(step_fn=lambda: ClosureResult(None)).consume_result()
        return results[0]

    def _forward_backward(
        self, args: tuple[Any, ...], batch: Batch, batch_idx: int, first: bool, stepping: bool
    ) -> dict[str, Any]:
        output = self._forward(args)
        if self.plan.stale():
            # training_step attached or patched something
            self.plan.resolve()
            self.resolve()
        loss, reported = self._loss(output)
        optimizer = self.plan.strategy.optimizers[0]
        if first:
            self.accumulation.start()
        if loss is None:
            zero_grad = (lambda: self._zero_grad(optimizer, batch_idx)) if first else None
            Closure(step_fn=lambda: ClosureResult(None), zero_grad_fn=zero_grad)()  # warns
            return reported
        exact = self.accumulation.exact
        if exact:
            loss = self.accumulation.weigh(loss, output, batch)
        elif (parts := self.trainer.accumulate_grad_batches) != 1:
            loss = loss / parts
            reported["loss"] = reported["loss"] / parts
        del output
        if first:
            self._zero_grad(optimizer, batch_idx)
        self._backward(loss, optimizer)
        if exact and stepping:
            self.accumulation.divide_gradients()
        return reported

    def _forward(self, args: tuple[Any, ...]) -> Any:
        plan, state = self.plan, self.plan.state
        before = state["_current_fx_name"]
        state["_current_fx_name"] = "training_step"
        output = plan.module.training_step(*args) if self.plain_forward else plan.strategy.training_step(*args)
        state["_current_fx_name"] = before
        if self.post_training_step:
            plan.strategy.post_training_step()
        if output is None and self.trainer.world_size > 1:
            raise RuntimeError(
                "Skipping the `training_step` by returning None in distributed training is not supported: the other "
                "ranks would wait for this one's gradients. Return a loss on every rank, zero where there is nothing."
            )
        return output

    def _loss(self, output: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """Split an output into the loss to differentiate and what is reported to hooks."""
        if output is None:
            return None, {}
        if isinstance(output, Tensor):
            loss, reported = output, {}
        elif isinstance(output, Mapping) and output.get("loss") is not None:
            loss, reported = output["loss"], {key: value for key, value in output.items() if key != "loss"}
        else:
            ClosureResult.from_training_step_output(output)
            raise AssertionError("Lightning refuses an output without a loss")
        shown = loss.detach()
        # a copy, since precision plugins and hooks may scale the loss in place
        return loss, {"loss": shown.clone() if self.reads_outputs else shown, **reported}

    def _zero_grad(self, optimizer: Any, batch_idx: int) -> None:
        plan, counter = self.plan, self.automatic.optim_progress.optimizer.zero_grad
        counter.increment_ready()
        plan.call("on_before_zero_grad", optimizer)
        counter.increment_started()
        if self.module_zero_grad:
            epoch = self.trainer.current_epoch
            plan.call_as("optimizer_zero_grad", plan.module.optimizer_zero_grad, epoch, batch_idx, optimizer)
        else:
            optimizer.zero_grad()
        counter.increment_completed()

    def _backward(self, loss: Tensor, optimizer: Any) -> None:
        plan, state = self.plan, self.plan.state
        before = state["_current_fx_name"]
        state["_current_fx_name"] = "backward"
        if not self.plain_backward:
            plan.strategy.backward(loss, optimizer)
        else:
            plan.call("on_before_backward", loss)
            if self.module_backward:
                plan.module.backward(loss)
            else:
                loss.backward()
            plan.call("on_after_backward")
        state["_current_fx_name"] = before

    def _optimizer_step(self, batch_idx: int, closure: Callable[[], Tensor | None]) -> None:
        plan, counter = self.plan, self.automatic.optim_progress.optimizer.step
        lightning_optimizer: Any = plan.strategy._lightning_optimizers[0]
        counter.increment_ready()
        plain = self.plain_optimizer_step and not self.module_optimizer_step
        if plain and type(lightning_optimizer).step is _OPTIMIZER_STEP:
            optimizer = lightning_optimizer._optimizer

            def closure_then_hooks() -> Tensor | None:
                loss = closure()
                self._after_closure(optimizer)
                return loss

            optimizer.step(closure=closure_then_hooks)
        else:
            # Lightning's type, by which user code may recognise the closure; it only passes the loss on
            lightnings = Closure(step_fn=lambda: ClosureResult(closure()))
            epoch, step = self.trainer.current_epoch, plan.module.optimizer_step
            plan.call_as("optimizer_step", step, epoch, batch_idx, lightning_optimizer, lightnings)
        counter.increment_completed()

    def _after_closure(self, optimizer: Optimizable) -> None:
        plan, trainer = self.plan, self.trainer
        plan.call("on_before_optimizer_step", optimizer)
        value = trainer.gradient_clip_val
        if value or self.clips_itself:
            # Lightning's own, for what it verifies about value and algorithm
            algorithm = trainer.gradient_clip_algorithm
            plan.precision._clip_gradients(plan.module, optimizer, value, gradient_clip_algorithm=algorithm)


def _backward_is_lightnings(plan: HookPlan) -> bool:
    """Whether the strategy's backward only calls the hooks and the module's."""
    strategy, precision = plan.strategy, plan.precision
    for name in ("pre_backward", "post_backward"):
        # DDP's own act in manual optimization only
        if overridden(strategy, name, STRATEGY) and overridden(strategy, name, _DDP):
            return False
    scaled = overridden(precision, "pre_backward", PRECISION) and not _mixes_without_scaler(plan, "pre_backward")
    own = any_overridden(precision, ("backward", "post_backward"), PRECISION)
    return not (overridden(strategy, "backward", STRATEGY) or scaled or own)


def _optimizer_step_is_lightnings(plan: HookPlan) -> bool:
    """Whether strategy and precision plugin do nothing around the optimizer's step but call the hooks."""
    strategy: Any = plan.strategy
    own = overridden(strategy, "optimizer_step", STRATEGY)
    if own and not overridden(strategy, "optimizer_step", _DDP):
        own = strategy._model_averager is not None
    scaled = overridden(plan.precision, "optimizer_step", PRECISION) and not _mixes_without_scaler(
        plan, "optimizer_step"
    )
    wrapped = any_overridden(plan.precision, ("_wrap_closure", "_after_closure"), PRECISION)
    return not (own or scaled or wrapped)


def _mixes_without_scaler(plan: HookPlan, name: str) -> bool:
    """Whether this is Lightning's mixed precision in bfloat16, which scales nothing."""
    precision: Any = plan.precision
    return not overridden(precision, name, _MIXED) and precision.scaler is None
