"""Read, in each training step, what the losses of the parts of a batch count by, and give them the batch's gradients.

one weight     a part's loss counts by it, as by a `loss_weight`: beside the loss, under the key `FOUND`
all leaves     the loss counts by samples, and the gradients of its leaves are put in their place (`Part.scale`)
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor

from ...core.devices import precise_dtype
from ...core.errors import ConfigError, PartsDiffer
from ..losses import FOUND, weight_in
from .plans import OF_SAMPLES, Part, Plan
from .programs import RETURNED
from .tape import Tape, active_tape
from .values import Values


class LossReader:
    """Follows the plans of a run's losses.

    Args:
        strategy: name that begins messages.

    Attributes:
        plan: of the loss that a step returns.
        parts: of the step in hand.
        merged: the leaves of the global batch's loss, where it is no mean of those of parts.
        counts: whether this process has samples of the batch.
        num_whole: samples of the global batch; None if all of them are here.
        values: how logged values follow from those of parts.
        sum_over_ranks: sums a tensor of shape (n,) over the ranks, each of which calls it; None for one process.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self.plan = OF_SAMPLES
        self.parts: list[Part] = []
        self.merged: list[Tensor] | None = None
        self.counts = True
        self.num_whole: float | None = None
        self.values = Values()
        self.sum_over_ranks: Callable[[Tensor], Tensor] | None = None
        self._is_seen = True

    def take(self, plan: Plan, module: Any) -> None:
        """Follow this plan of a module's losses from now on."""
        self.plan = plan
        # what a loss is computed of is not seen where the step itself is compiled
        self._is_seen = self.plan.is_of_samples or getattr(module, "_compiler_ctx", None) is None
        if not self._is_seen:
            rank_zero_info(
                f"{self._strategy}: training steps run uncompiled, since what their loss divides by can't be read in a "
                'compiled step. Compile the model inside the module, or return {"loss": loss, "loss_weight": n}.'
            )

    def begin_step(self, counts: bool = True, num_whole: float | None = None) -> None:
        """Begin a step on another batch."""
        self.counts, self.num_whole, self.merged = counts, num_whole, None
        if self.parts:
            self.parts = []

    def reading(self, step: Callable[..., Any], num: float) -> Callable[..., Any]:
        """Return a step that reads its loss, of `num` samples, once it is known.

        Raises:
            ConfigError: it is computed otherwise than in the run's first step, as far as is known without waiting.
        """
        return step if self.plan.is_of_samples else partial(self._read, step, num)

    def _read(self, step: Callable[..., Any], num: float, *args: Any, **kwargs: Any) -> Any:
        plan, tape = self.plan, active_tape()
        assert plan.program is not None
        eagerly = nullcontext() if self._is_seen else torch.compiler.set_stance("force_eager")
        with eagerly, nullcontext(tape) if tape is not None else Tape({RETURNED: plan.program}) as recording:
            output = step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or weight_in(output) is not None:
            return output
        part = Part(loss, plan, num if self.counts else 0, recording)
        if self.counts and loss.is_cpu and not plan.program.fits(part.rows, loss.detach()):
            self.plan, is_alone = OF_SAMPLES, self.sum_over_ranks is None  # which goes on with whole batches
            raise (PartsDiffer if is_alone else ConfigError)(
                f"{self._strategy}: the loss is computed otherwise than in the first step, so what it divides by is "
                'not known. Use evener.mean, or return {"loss": loss, "loss_weight": n} from training_step.'
            )
        self.parts.append(part)
        if plan.needs_all:
            return output
        part.guard()
        return {**(output if isinstance(output, dict) else {}), "loss": loss, FOUND: part.weight}

    @property
    def whole(self) -> Tensor | None:
        """The loss of the global batch, where it is no mean of those of parts; None where it is."""
        return None if self.merged is None or self.plan.program is None else self.plan.program.value(self.merged)

    def scale(self) -> None:
        """Put the batch's gradients in the place of parts', before these go backward; all ranks call it."""
        program = self.plan.program
        if program is None or not self.plan.needs_all:
            return
        device = self.parts[0].loss.device if self.parts else torch.device("cpu")
        rows = [part.rows for part in self.parts] or [[torch.zeros(size) for size in program.sizes]]
        merged = program.merged(rows, device)
        if self.sum_over_ranks is not None:
            packed = torch.cat([row.to(precise_dtype(row.device)) for row in merged])
            merged = list(self.sum_over_ranks(packed).split(program.sizes))
        self.merged = merged
        whole = self.num_whole or sum(part.num for part in self.parts)
        for part in self.parts:
            part.scale(merged, part.num / whole)
