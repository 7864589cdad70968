"""Read, in each training step, what the losses of the parts of a batch count by, and give them the batch's gradients.

one weight     a part's loss counts by it, as by a `loss_weight`: beside the loss, under the key `FOUND`
all leaves     the loss counts by samples, and the gradients of its leaves are put in their place (`Part.scale`)
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor

from ...core.devices import precise_dtype
from ...core.errors import ConfigError
from ..losses import FOUND, weight_in
from .plans import OF_SAMPLES, Part, Plan
from .values import RETURNED, Tape, Values, active_tape


class LossReader:
    """Follows the plans of a run's losses.

    Args:
        strategy: name that begins messages.

    Attributes:
        plans: of the loss; in manual optimization of each call of `manual_backward` in a step.
        parts: of the step in hand.
        counts: whether this process has samples of the batch.
        num_whole: samples of the global batch; None if all of them are here.
        values: how logged values follow from those of parts.
        sum_over_ranks: sums a tensor of shape (n,) over the ranks, each of which calls it; None for one process.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self.plans: list[Plan] = [OF_SAMPLES]
        self.parts: list[Part] = []
        self.counts = True
        self.num_whole: float | None = None
        self.values = Values()
        self.sum_over_ranks: Callable[[Tensor], Tensor] | None = None
        self._num_calls, self._is_seen = 0, True

    @property
    def plan(self) -> Plan:
        """That of the loss that a step returns."""
        return self.plans[0]

    def take(self, plans: list[Plan], module: Any) -> None:
        """Follow these plans of a module's losses from now on."""
        self.plans = plans
        # what a loss is computed of is not seen where the step itself is compiled
        self._is_seen = self.plan.is_of_samples or getattr(module, "_compiler_ctx", None) is None
        if not self._is_seen:
            rank_zero_info(
                f"{self._strategy}: training steps run uncompiled, since what their loss divides by can't be read in a "
                'compiled step. Compile the model inside the module, or return {"loss": loss, "loss_weight": n}.'
            )

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
        """Return a step that reads its loss, of `num` samples, once it is known.

        Args:
            num_here: samples of this process, if a part may go backward before the next has been forward.
        """
        return step if self.plan.is_of_samples else partial(self._read, step, num, num_here)

    def _read(self, step: Callable[..., Any], num: float, num_here: float | None, *args: Any, **kwargs: Any) -> Any:
        tape, program = active_tape(), self.plan.program
        assert program is not None
        eagerly = nullcontext() if self._is_seen else torch.compiler.set_stance("force_eager")
        with eagerly, nullcontext(tape) if tape is not None else Tape({RETURNED: program}) as recording:
            output = step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or weight_in(output) is not None:
            return output
        part = self.part(loss, self.plan, num, recording)
        if self.plan.is_linear and num_here is not None:
            part.scale_alone(part.num / (self.num_whole or num_here))
        if self.plan.needs_all:
            return output
        return {**(output if isinstance(output, dict) else {}), "loss": loss, FOUND: part.weight}

    def part(self, loss: Tensor, plan: Plan, num: float, tape: Tape | None = None) -> Part:
        """Read the loss of one part of a batch, of the tape that records in this thread if none is given.

        Raises:
            ConfigError: it is computed otherwise than in the run's first step, as far as is known without waiting.
        """
        tape = tape or active_tape()
        assert tape is not None
        part = Part(loss, plan, num if self.counts else 0, tape)
        if self.counts and loss.is_cpu and not part.program.fits(part.rows, loss.detach()):
            raise ConfigError(
                f"{self._strategy}: the loss is computed otherwise than in the first step, so what it divides by is "
                'not known. Use evener.mean, or return {"loss": loss, "loss_weight": n} from training_step.'
            )
        self.parts.append(part)
        return part

    def weighed(self, losses: Sequence[Tensor], sizes: Sequence[int], tapes: Sequence[Tape]) -> list[Any]:
        """Read the losses of parts that all go backward together, in manual optimization.

        Returns:
            The losses, beside what they count by where that is not their samples.
        """
        plan = self.next_plan()
        if plan.is_of_samples:
            return list(losses)
        self.parts = []
        for one in zip(losses, sizes, tapes, strict=True):
            self.part(one[0], plan, *one[1:])
        self.scale(plan)
        return [{"loss": part.loss, FOUND: part.weight} for part in self.parts]

    def scale(self, plan: Plan | None = None) -> None:
        """Put the batch's gradients in the place of parts', before these go backward; all ranks call it.

        Args:
            plan: of the loss; None for that of the loss that the step returns.
        """
        plan = plan or self.plan
        program = plan.program
        if program is None or not plan.needs_all:
            return
        device = self.parts[0].loss.device if self.parts else torch.device("cpu")
        rows = [part.rows for part in self.parts] or [[torch.zeros(size) for size in program.sizes]]
        merged = program.merged(rows, device)
        if self.sum_over_ranks is not None:
            packed = torch.cat([row.to(precise_dtype(row.device)) for row in merged])
            merged = list(self.sum_over_ranks(packed).split(program.sizes))
        whole = self.num_whole or sum(part.num for part in self.parts)
        for part in self.parts:
            part.scale(merged, part.num / whole)
