"""Read, in each training step, what the losses of the parts of a batch divide by, and scale their terms.

one normaliser     a part's loss counts by it, as by a `loss_weight`: beside the loss, under the key `FOUND`
several, sums      the whole loss counts by samples, and the terms for which that is wrong are scaled (`Part.scale`)
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.devices import precise_dtype
from ...core.errors import ConfigError
from ..losses import FOUND, weight_in
from .normalisers import OF_SAMPLES, Number, Part, Plan, Recorder, Unfit, ratio
from .values import Values


class LossReader:
    """Follows the plans of a run's losses.

    Args:
        strategy: name that begins messages.

    Attributes:
        plans: of the loss; in manual optimization of each call of `manual_backward` in a step.
        parts: of the step in hand.
        at_once: whether each part may go backward as soon as it is known.
        counts: whether this process has samples of the batch.
        num_whole: samples of the global batch; None if all of them are here.
        values: how logged values follow from those of parts.
        sum_over_ranks: sums a tensor of shape (n,) over the ranks, each of which calls it; None for one process.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self.plans: list[Plan] = [OF_SAMPLES]
        self.parts: list[Part] = []
        self.at_once = False
        self.counts = True
        self.num_whole: float | None = None
        self.values = Values()
        self.sum_over_ranks: Callable[[Tensor], Tensor] | None = None
        self._num_calls = 0

    @property
    def plan(self) -> Plan:
        """That of the loss that a step returns."""
        return self.plans[0]

    def take(self, plans: list[Plan]) -> None:
        """Follow these plans from now on."""
        self.plans = plans
        # sums of several normalisers must be known before the first part goes backward
        self.at_once = self.at_once and all(term.kind != "mean" for plan in plans for term in plan.others)

    def begin_step(self, counts: bool = True, num_whole: float | None = None) -> None:
        """Begin a step on another batch."""
        self._num_calls, self.counts, self.num_whole = 0, counts, num_whole
        if self.parts:
            self.parts = []

    def next_plan(self) -> Plan:
        """The plan of the next call of `manual_backward` in a step."""
        self._num_calls += 1
        return self.plans[min(self._num_calls, len(self.plans)) - 1]

    def reading(self, step: Callable[..., Any], num: float, num_here: float | None = None) -> Callable[..., Any]:
        """Return a step that reads its loss, of `num` samples of the `num_here` of this process, once it is known."""
        return step if self.plan.is_of_samples else partial(self._read, step, num, num_here)

    def _read(self, step: Callable[..., Any], num: float, num_here: float | None, *args: Any, **kwargs: Any) -> Any:
        with Recorder() if self.plan.others else nullcontext() as recorder:
            output = step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or weight_in(output) is not None:
            return output
        part = self.part(loss, self.plan, num, recorder)
        rest = output if isinstance(output, dict) else {}
        if self.plan.base:
            return {**rest, "loss": loss, FOUND: part.normalisers[self.plan.base]}
        if self.at_once:
            whole = self.num_whole or num_here or num
            part.scale({0: whole}, num / whole)
        return output

    def part(self, loss: Tensor, plan: Plan, num: float, recorder: Recorder | None = None) -> Part:
        """Read the loss of one part of a batch.

        Raises:
            ConfigError: it has other terms than in the run's first step.
        """
        try:
            part = Part(loss, plan, num, recorder)
        except Unfit as exc:
            raise ConfigError(
                f"{self._strategy}: the loss has other terms than in the first step ({exc}), so what they divide by is "
                'not known. Use evener.mean, or return {"loss": loss, "loss_weight": n} from training_step.'
            ) from exc
        if not self.counts:
            part.normalisers = dict.fromkeys(part.normalisers, 0.0)
        self.parts.append(part)
        return part

    def weighed(self, losses: Sequence[Tensor], sizes: Sequence[int]) -> list[Any]:
        """Read the losses of parts that all go backward together, in manual optimization.

        Returns:
            The losses, beside what they count by where that is not their samples.
        """
        plan = self.next_plan()
        if plan.is_of_samples:
            return list(losses)
        self.parts = []
        parts = [self.part(loss, plan, size) for loss, size in zip(losses, sizes, strict=True)]
        self.scale(plan)
        if not plan.base:
            return [part.loss for part in parts]
        return [{"loss": part.loss, FOUND: part.normalisers[plan.base]} for part in parts]

    def scale(self, plan: Plan | None = None) -> None:
        """Scale the terms for which the weight of the whole loss is wrong, before it goes backward; all ranks call it.

        Args:
            plan: of the loss; None for that of the loss that the step returns.
        """
        plan = plan or self.plan
        if not plan.others or self.at_once:
            return
        totals: dict[int, Number] = {
            group: sum((part.normalisers.get(group, 0.0) for part in self.parts), start=0.0)
            for group in (0, *plan.groups)
        }
        if self.num_whole is not None:
            totals[0] = self.num_whole
        if self.sum_over_ranks is not None and plan.groups:
            local = [totals[group] for group in plan.groups]
            totals |= zip(plan.groups, self.sum_over_ranks(_stacked(local)).unbind(), strict=True)
        for part in self.parts:
            part.scale(totals, ratio(part.normalisers[plan.base], totals[plan.base]))

    def changed_parts(self) -> list[Part]:
        """The parts of which the loss has another value than the module computed."""
        return [part for part in self.parts if part.loss is not part.own_loss]

    def valued(self, outputs: Sequence[Any]) -> list[Any]:
        """Give the losses in the outputs of a step the values that their scaled terms have."""
        values = {part.own_loss.data_ptr(): part.loss for part in self.changed_parts()}

        def of(loss: Any) -> Any:
            value = values.get(loss.data_ptr(), loss) if isinstance(loss, Tensor) else loss
            return value if value is loss or loss.requires_grad else value.detach()

        if not values:
            return list(outputs)
        return [{**one, "loss": of(one.get("loss"))} if isinstance(one, dict) else of(one) for one in outputs]


def _stacked(numbers: Sequence[Any]) -> Tensor:
    device = next((number.device for number in numbers if isinstance(number, Tensor)), torch.device("cpu"))
    return torch.stack([torch.as_tensor(number).to(device, precise_dtype(device)) for number in numbers])
