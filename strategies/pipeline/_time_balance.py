"""Move the cut between stages once, to where they take the same time, measured in the first steps of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytorch_lightning as pl
import torch
from torch import Tensor

from ..core.devices import precise_dtype
from ..core.errors import ConfigError
from ..core.optimizer_states import state_to_parameters
from ._part_times import PartTimes
from ._plan import StagePlan, balanced_plan
from .stages import Stages

_FIRST, _LAST = 1, 4
"""Optimizer steps after which measuring begins and ends: the first one prepares memory and kernels."""


@dataclass
class TimeBalance:
    """Measures the parts of a module for some steps, and then moves the cut.

    Args:
        module: the placed module.
        stages: where its parts are.
        mean_over_ranks: averages what the processes that hold a copy each have measured, so that all cut alike.
        times: what measures the steps now; None before and after.
    """

    module: pl.LightningModule
    stages: Stages
    mean_over_ranks: Callable[[Tensor], Tensor] | None = None
    times: PartTimes | None = field(default=None, init=False)
    _num_steps: int = field(default=0, init=False)

    def finish_step(self) -> str | None:
        """Learn that the optimizer has stepped; tells, once, when all has moved, what was measured and decided."""
        self._num_steps += 1
        if self._num_steps == _FIRST:
            devices = self.stages.device_of_parts()
            self.times = PartTimes(self.module, {name: devices[name] for name in self.stages.modules(self.module)})
        if self._num_steps != _LAST or self.times is None:
            return None
        times, self.times = self.times, None
        times.close()
        return self._move(self._agreed(times.seconds()))

    def close(self) -> None:
        """Stop measuring."""
        if self.times is not None:
            self.times.close()

    def _agreed(self, seconds: dict[str, float]) -> dict[str, float]:
        """What all ranks have measured on the average; the same on every rank."""
        if self.mean_over_ranks is None:
            return seconds
        root = self.stages.devices[0]
        means = self.mean_over_ranks(torch.tensor(list(seconds.values()), dtype=precise_dtype(root), device=root))
        return dict(zip(seconds, means.tolist(), strict=True))

    def _move(self, seconds: dict[str, float]) -> str:
        stages, before = self.stages, self.stages.plan
        assert before is not None
        weights = stages.options.device_weights or [1.0] * stages.num_stages
        work = {name: seconds.get(name, 0.0) * weights[stage] for name, stage in before.stage_of.items()}
        plan = balanced_plan(self.module, work, weights)
        parameters = list(self.module.parameters())
        stages.move(self.module, plan)
        if any(now is not then for now, then in zip(self.module.parameters(), parameters, strict=True)):
            raise ConfigError(
                "balance=time: torch makes new parameters for another device of these types "
                f"({', '.join(map(str, stages.devices))}), and optimizers would go on with the old ones. Set "
                "balance=memory."
            )
        for optimizer in self.module.trainer.optimizers:
            state_to_parameters(optimizer)
        return (
            f"balance=time: milliseconds of a micro-batch by stage, {_stage_ms(before, work, weights)} "
            f"as it was cut by memory, {_stage_ms(plan, work, weights)} now:\n{stages.table(self.module)}"
        )


def _stage_ms(plan: StagePlan, work: dict[str, float], weights: Sequence[float]) -> str:
    seconds = [
        sum(work[name] for name, where in plan.stage_of.items() if where == stage) / weight
        for stage, weight in enumerate(weights)
    ]
    return " ".join(f"{second * 1e3:.2f}" for second in seconds)
