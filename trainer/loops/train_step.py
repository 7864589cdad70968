"""Run one training step with automatic optimization: forward, backward, optimizer, in Lightning's order.

A lean step is what Lightning's comes to where nobody overrides more than `backward`, clipping and hooks; every other
one is Lightning's own. torch's wrappers, which cost more than a tiny model's work, are called where they have any use.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.loops.fetchers import _DataFetcher
from pytorch_lightning.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from pytorch_lightning.plugins.precision import MixedPrecision, Precision
from pytorch_lightning.strategies import ParallelStrategy, Strategy
from pytorch_lightning.trainer import call
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from typing_extensions import override

from ...strategies.batch.exact.loss_reader import LossReader
from ...strategies.batch.exact.verdict import Views
from ...strategies.batch.exact.verifier import verified
from ...strategies.batch.results import loss_and_others, loss_weight, weighs_in_loop
from ...strategies.batch.run_structures import batch_structure
from ...strategies.core.errors import ConfigError
from ...strategies.core.loop_contract import NothingToDo
from ...strategies.core.patching import Replacement
from ...strategies.core.types import Batch
from ...strategies.registry import ranks_of
from .step_plan import StepPlan, overridden

_HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip
_INNERMOST: dict[type, Any] = {
    kind: inspect.unwrap(kind.step)
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind not in (Optimizer, torch.optim.LBFGS)
}
_ZERO_GRAD, _STEP = Optimizer.zero_grad, LightningOptimizer.step
_BACKWARD = (Tensor.backward, torch.autograd.backward)


def _updates_plainly(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of torch's, with its own methods, and no hook that runs before its closure."""
    kind, own = type(optimizer), vars(optimizer)
    is_own = "step" in own and not getattr(own["step"], "_wrapped_by_lr_sched", False)  # schedulers wrap it to count
    known = kind in _INNERMOST and inspect.unwrap(kind.step) is _INNERMOST[kind]
    has_hooks = optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
    return known and not (is_own or has_hooks) and kind.zero_grad is _ZERO_GRAD and "zero_grad" not in own


def _backward(loss: Tensor) -> None:
    if type(loss) is not Tensor or loss.dim() or not loss.requires_grad or not loss.is_floating_point():
        loss.backward()  # raises torch's own error
        return
    _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class AccumulatingOptimization(_AutomaticOptimization):
    """Lightning's automatic optimization, whose accumulated steps are exact if `exact_accumulation` asks.

    Each loss is multiplied by its weight, and the gradients are divided once by the sum of the weights.
    """

    trainer: Any
    total: Tensor | float = 0.0  # the sum of the weights in the current optimizer step
    num_none = 0  # batches for which `training_step` returned None
    _is_divided = False
    _reader: LossReader | None = None

    def begin_epoch(self) -> None:
        """Refuse exact accumulation under a strategy with its own rule; have Lightning's strategies read losses."""
        strategy = self.trainer.strategy
        if not weighs_in_loop(self.trainer):
            return
        if strategy.handles_gradient_accumulation:
            raise ConfigError(
                f"exact_accumulation=True is not supported with {type(strategy).__name__}, which accumulates gradients "
                "by its own rule. Set exact_accumulation=False, or choose another strategy."
            )
        if not hasattr(strategy, "contract"):
            known = vars(strategy).get("training_step")
            if isinstance(known, Replacement):  # of an earlier epoch or run
                known.remove()
            Replacement(strategy, "training_step", self._step)

    def _step(self, own: Callable[..., Any], *args: Any) -> Any:
        """Run a training step, and find what its loss divides by, where no strategy does, which see only one batch."""
        if self._reader is None:
            self._reader = LossReader("exact_accumulation")
            views, structure = Views(ranks=True, chunks=False), batch_structure(self.trainer)
            found = verified(self.trainer.strategy, views, False, args, structure=structure)
            self._reader.take(found.plans[0], self.trainer.lightning_module)
        self._reader.begin_step()
        return self._reader.reading(own, 1)(*args)

    def read(
        self, output: Any, batch: Batch, batch_idx: int, copies: bool = True
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """What goes backward of a micro-batch, None if it is skipped, and outputs, perhaps with a copy of the loss."""
        trainer, parts = self.trainer, self.trainer.accumulate_grad_batches
        exact = parts != 1 and weighs_in_loop(trainer)
        if exact and batch_idx % parts == 0:  # an optimizer that computes it again begins anew
            self.total, self._is_divided = 0.0, False
        if output is None:
            if trainer.world_size > 1:
                raise RuntimeError(
                    "Skipping the `training_step` by returning None in distributed training is not supported: the "
                    "other ranks would wait for this rank's gradients. Return a loss on every rank, zero if there is "
                    "nothing to train on."
                )
            self.num_none += 1
            return None, {}
        loss, others = loss_and_others(output)
        if parts != 1 and not exact:
            loss = loss / parts
        reported = {"loss": loss.detach().clone() if copies else loss.detach(), **others}
        if not exact:
            return loss, reported
        if self._is_divided:
            raise ConfigError(
                f"exact_accumulation=True: {type(trainer.optimizers[0]).__name__} calls its closure again within a "
                "step, which adds the last micro-batch to gradients that are the mean over all of them. Choose an "
                "optimizer that calls its closure once, or accumulate_grad_batches=1."
            )
        weight = loss_weight(output, batch, batch_structure(trainer))
        weight = weight.detach() if isinstance(weight, Tensor) else weight
        self.total = self.total + weight
        return loss * weight, reported

    def divide_gradients(self) -> None:
        """Divide the gradients by the sum of weights, after a step's last backward, where losses were weighed."""
        if not weighs_in_loop(self.trainer):
            return
        ranks = ranks_of(self.trainer.strategy)
        # ranks' gradients are summed here, so that hooks see one device's
        total = self.total if ranks is None else ranks.group.mean(self.total) * ranks.world_size
        # where all weights are zero, so are the gradients, which must not become nan
        divisor = torch.where(total == 0, 1, total) if isinstance(total, Tensor) else total or 1.0
        updated = (p for one in self.trainer.optimizers for group in one.param_groups for p in group["params"])
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in dict.fromkeys([*self.trainer.lightning_module.parameters(), *updated]):
            if (gradient := parameter.grad) is not None:
                groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, _), gradients in groups.items():
            torch._foreach_div_(gradients, divisor.to(device) if isinstance(divisor, Tensor) else divisor)
        self._is_divided = True

    @override
    def _training_step(self, kwargs: Any) -> ClosureResult:  # of steps that are not lean, as below
        trainer = self.trainer
        output = call._call_strategy_hook(trainer, "training_step", *kwargs.values())
        trainer.strategy.post_training_step()
        loss, reported = self.read(output, next(iter(kwargs.values())), trainer.fit_loop.batch_idx)
        result = ClosureResult(loss, extra={key: value for key, value in reported.items() if key != "loss"})
        result.loss = reported.get("loss")
        if loss is None and not trainer.fit_loop._should_accumulate():
            self.divide_gradients()
        return result

    @override
    def _make_backward_fn(self, optimizer: Optimizer) -> Callable[[Tensor], None] | None:
        backward, fit_loop = super()._make_backward_fn(optimizer), self.trainer.fit_loop

        def backward_and_divide(loss: Tensor) -> None:
            assert backward is not None
            backward(loss)
            if not fit_loop._should_accumulate():
                self.divide_gradients()
            if fit_loop.sections is not None:
                fit_loop.sections.count()

        return None if backward is None else backward_and_divide


class TrainStep(StepPlan):
    """The lean training step."""

    def __init__(self, trainer: Any, fetcher: _DataFetcher, automatic: AccumulatingOptimization) -> None:
        self.automatic = automatic
        super().__init__(trainer, fetcher, "training_step", _HOOKS)
        # Lightning's fetcher also returns the indices of the batch and of the loader
        self.next_batch = (lambda: next(fetcher)[0]) if self.loader is None else self.loader.__next__

    @override
    def resolve(self) -> None:
        super().resolve()
        module, precision, contract, optimizers = self.module, self.precision, self.contract, self.strategy.optimizers
        self.optimizer: Any = optimizers[0] if optimizers else None
        self.is_lean = (
            len(optimizers) == 1
            and self._is_known()
            and _updates_plainly(self.optimizer)
            and not contract.changes_update(self.optimizer)
        )
        self.update: Any = getattr(getattr(type(self.optimizer), "step", None), "__wrapped__", None)
        hooks, own = self.work.get("on_train_batch_end", ((), None))  # which a bar does not need the outputs for
        draw = None if self.trainer.timed_bar is None else self.trainer.timed_bar.draw
        self.reads_outputs = own is not None or any(getattr(hook, "func", hook) != draw for hook in hooks)
        backward = _backward if (Tensor.backward, torch.autograd.backward) == _BACKWARD else Tensor.backward
        self.bring_back = module.backward if overridden(module, LightningModule, "backward") else backward
        hooked = {"on_before_backward", "on_after_backward"} & self.work.keys()
        self.hooked_backward = bool(hooked) or not isinstance(contract, NothingToDo)
        self.clips_itself = overridden(module, LightningModule, "configure_gradient_clipping", "clip_gradients")
        self.clips_itself |= overridden(precision, Precision, "_clip_gradients", "clip_gradients")

    def _is_known(self) -> bool:
        """Whether all that a step calls beside its hooks is Lightning's and the contract's part."""
        strategy, precision, mixed = self.strategy, self.precision, ("pre_backward", "optimizer_step")
        blocks_sync = ("block_backward_sync",) if isinstance(strategy, ParallelStrategy) else ()
        mixes_only = isinstance(precision, MixedPrecision) and precision.scaler is None  # as with bfloat16
        return (
            self.module.automatic_optimization
            and self.keeps_contract("backward", "pre_backward", "post_backward", "optimizer_step", *blocks_sync)
            and not overridden(strategy, Strategy, "post_training_step")
            and not overridden(self.module, LightningModule, "optimizer_step", "optimizer_zero_grad")
            and not overridden(precision, Precision, "backward", "post_backward", "_wrap_closure", "_after_closure")
            and not overridden(precision, MixedPrecision if mixes_only else Precision, *mixed)
            and all(type(optimizer).step is _STEP for optimizer in strategy._lightning_optimizers)
        )

    def fits(self) -> bool:
        """Whether the next step may be lean."""
        if self.is_lean and self.optimizer is not self.strategy.optimizers[0]:
            self.resolve()
        return self.is_lean and not self.automatic._skip_backward and torch.is_grad_enabled()

    def run(self, batch: Batch, batch_idx: int, stepping: bool) -> dict[str, Any]:
        """Run a step on one micro-batch, after which the optimizer is `stepping` or not; returns outputs for hooks."""
        trainer, progress = self.trainer, self.automatic.optim_progress.optimizer.step
        if stepping:
            progress.increment_ready()
            reported = self._forward_backward(batch, batch_idx)
            if trainer.accumulate_grad_batches != 1:
                self.automatic.divide_gradients()
            if "on_before_optimizer_step" in self.work:
                self.call("on_before_optimizer_step", self.optimizer)
            if trainer.gradient_clip_val or self.clips_itself:
                self.precision._clip_gradients(
                    self.module, self.optimizer, trainer.gradient_clip_val,
                    gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                )  # fmt: skip
        else:
            with self.contract.accumulating("on_after_backward" in self.work):
                reported = self._forward_backward(batch, batch_idx)
        if trainer.fit_loop.sections is not None:
            trainer.fit_loop.sections.count()
        if stepping:
            self._update()
            self.contract.finish_step()
            progress.increment_completed()
        return reported

    def _forward_backward(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        output = self.call_as("training_step", self.step, *((batch, batch_idx) if self.takes_index else (batch,)))
        if self.stale():
            self.resolve()
        loss, reported = self.automatic.read(output, batch, batch_idx, self.reads_outputs)
        del output
        first = batch_idx % self.trainer.accumulate_grad_batches == 0
        if loss is None:
            Closure(lambda: ClosureResult(None), zero_grad_fn=self._zero_grad if first else None)()  # warns
            return reported
        if first:
            self._zero_grad()
        self.call_as("backward", self._backward if self.hooked_backward else self.bring_back, loss)
        return reported

    def _zero_grad(self) -> None:
        progress: Any = self.automatic.optim_progress.optimizer.zero_grad
        optimizer = self.optimizer
        for counts in (progress.total, progress.current):
            counts.ready += 1
            counts.started += 1
            counts.completed += 1
        if "on_before_zero_grad" in self.work:
            self.call("on_before_zero_grad", optimizer)
        if _profiler_enabled():
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _backward(self, loss: Tensor) -> None:
        if "on_before_backward" in self.work:
            self.call("on_before_backward", loss)
        self.bring_back(self.contract.scale_loss(loss))
        self.contract.finish_backward()
        if "on_after_backward" in self.work:
            self.call("on_after_backward")

    def _update(self) -> None:
        optimizer = self.optimizer
        if (
            optimizer._optimizer_step_post_hooks
            or optimizer._optimizer_step_pre_hooks
            or _global_optimizer_post_hooks
            or _global_optimizer_pre_hooks
            or _profiler_enabled()
        ):
            optimizer.step()
            return
        optimizer._opt_called = True  # which torch's learning rate schedulers check
        self.update(optimizer)
