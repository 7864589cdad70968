"""Accumulate gradients exactly: an accumulated step is the mean over all its samples, or over all its loss weights.

Lightning divides each micro-batch's loss by `accumulate_grad_batches`, which is correct only if every step has exactly
that many micro-batches of equal size. Here each loss is multiplied by its weight, and the gradients are divided once by
the sum of the weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from pytorch_lightning.trainer import call
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ...strategies.batch.exact.loss_reader import LossReader
from ...strategies.batch.exact.verdict import Views
from ...strategies.batch.exact.verifier import verified
from ...strategies.batch.results import loss_and_others, loss_weight, weighs_in_loop
from ...strategies.batch.run_structures import batch_structure
from ...strategies.core.errors import ConfigError
from ...strategies.core.patching import Replacement
from ...strategies.core.types import Batch
from ...strategies.registry import ranks_of


class AccumulatingOptimization(_AutomaticOptimization):
    """Lightning's automatic optimization, which weighs the losses of an optimizer step if `exact_accumulation` asks.

    Attributes:
        total: the sum of the weights in the current optimizer step.
        num_none: number of batches for which `training_step` returned None.
    """

    total: Tensor | float = 0.0
    num_none = 0
    _is_divided = False
    _reader: LossReader | None = None

    @property
    def exact(self) -> bool:
        """Whether micro-batches are weighted now; callbacks may change `accumulate_grad_batches` between epochs."""
        return weighs_in_loop(self.trainer)

    def verify(self) -> None:
        """Refuse exact accumulation under a strategy that accumulates by its own rule."""
        if self.exact and self.trainer.strategy.handles_gradient_accumulation:
            raise ConfigError(
                f"exact_accumulation=True is not supported with {type(self.trainer.strategy).__name__}, which "
                "accumulates gradients by its own rule. Set exact_accumulation=False, or choose another strategy."
            )
        strategy: Any = self.trainer.strategy
        known = vars(strategy).get("training_step")
        if self.exact and not hasattr(strategy, "contract"):
            if isinstance(known, Replacement):  # of an earlier run
                known.remove()
            Replacement(strategy, "training_step", self._step)

    def read(
        self, output: Any, batch: Batch, batch_idx: int, copies: bool = True
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Read what `training_step` has returned for a micro-batch.

        Args:
            copies: whether the loss is reported as a copy: precision plugins and hooks may scale it in place.

        Returns:
            The loss that goes backward, or None where the module skips the step, and the outputs for hooks.
        """
        parts = self.trainer.accumulate_grad_batches
        exact = parts != 1 and self.exact
        if exact and batch_idx % parts == 0:  # an optimizer that computes it again begins anew
            self.total, self._is_divided = 0.0, False
        if output is None:
            self._verify_may_skip()
            return None, {}
        loss, others = loss_and_others(output)
        if parts != 1 and not exact:
            loss = loss / parts
        reported = {"loss": loss.detach().clone() if copies else loss.detach(), **others}
        return self._weighed(loss, output, batch) if exact else loss, reported

    def _verify_may_skip(self) -> None:
        if self.trainer.world_size > 1:
            raise RuntimeError(
                "Skipping the `training_step` by returning None in distributed training is not supported: the other "
                "ranks would wait for this rank's gradients. Return a loss on every rank, zero if there is nothing to "
                "train on."
            )
        self.num_none += 1

    def _weighed(self, loss: Tensor, output: Any, batch: Batch) -> Tensor:
        if self._is_divided:  # the optimizer computes the last micro-batch again
            raise ConfigError(
                f"exact_accumulation=True: {type(self.trainer.optimizers[0]).__name__} calls its closure again within "
                "a step, which adds the last micro-batch to gradients that are the mean over all of them. Choose an "
                "optimizer that calls its closure once, or accumulate_grad_batches=1."
            )
        weight = loss_weight(output, batch, batch_structure(self.trainer))
        if isinstance(weight, Tensor):
            weight = weight.detach()
        self.total = self.total + weight
        return loss * weight

    def _step(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a training step, and find what its loss divides by, where no strategy does, which see only one batch."""
        if self._reader is None:
            self._reader = LossReader("exact_accumulation")
            views, structure = Views(ranks=True, chunks=False), batch_structure(self.trainer)
            found = verified(self.trainer.strategy, views, False, args, structure=structure)
            self._reader.take(found.plans[0], self.trainer.lightning_module)
        self._reader.begin_step()
        return self._reader.reading(own, 1)(*args, **kwargs)

    def divide_gradients(self) -> None:
        """Divide the gradients of the weighted sum by the sum of weights; call it once, after the last backward."""
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
    def _training_step(self, kwargs: Any) -> ClosureResult:  # of steps that are not lean, as all below
        trainer = self.trainer
        output = call._call_strategy_hook(trainer, "training_step", *kwargs.values())
        trainer.strategy.post_training_step()
        loss, reported = self.read(output, next(iter(kwargs.values())), trainer.fit_loop.batch_idx)
        result = ClosureResult(loss, extra={key: value for key, value in reported.items() if key != "loss"})
        result.loss = reported.get("loss")
        if loss is None and self._divides():
            self.divide_gradients()
        return result

    def _divides(self) -> bool:
        return self.exact and not self.trainer.fit_loop._should_accumulate()

    @override
    def _make_backward_fn(self, optimizer: Optimizer) -> Callable[[Tensor], None] | None:
        backward = super()._make_backward_fn(optimizer)
        sections: Any = self.trainer.fit_loop.sections  # pyright: ignore[reportAttributeAccessIssue]  # of our loop
        divides = self._divides()
        if backward is None or not (divides or sections is not None):
            return backward

        def backward_and_divide(loss: Tensor) -> None:
            backward(loss)
            if divides:
                self.divide_gradients()
            if sections is not None:
                sections.count()

        return backward_and_divide
