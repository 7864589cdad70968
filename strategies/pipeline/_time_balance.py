"""Move the cut between stages once, to where they take the same time, measured in the first steps of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from ..core.devices import precise_dtype, seconds_between, time_mark
from ..core.errors import ConfigError
from ..core.loop_contract import state_to_parameters
from ._plan import StagePlan, balanced_plan
from .stages import Stages

_FIRST, _LAST = 1, 4
"""Optimizer steps after which measuring begins and ends: the first one prepares memory and kernels."""


@dataclass
class TimeBalance:
    """Measures the forward passes of a module's parts for some steps, and then moves the cut.

    Args:
        module: the placed module.
        stages: where its parts are.
        mean_over_ranks: averages what the processes that hold a copy each have measured, so that all cut alike.
    """

    module: pl.LightningModule
    stages: Stages
    mean_over_ranks: Callable[[Tensor], Tensor] | None = None
    _num_steps: int = field(default=0, init=False)
    _marks: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]], init=False)
    """By part, where each of its forward passes begins and ends."""

    def finish_step(self) -> str | None:
        """Learn that the optimizer has stepped; tells, once, when all has moved, what was measured and decided."""
        self._num_steps += 1
        if self._num_steps == _FIRST:
            self._measure()
        return self._move(self._agreed(self._seconds())) if self._num_steps == _LAST else None

    def _measure(self) -> None:
        """Mark each part's forward passes in training, by hooks that go when the stages move."""
        devices = self.stages.device_of_parts()
        for name in self.stages.modules(self.module):
            marks = self._marks[name] = list[Any]()

            def mark(*_: Any, marks: list[Any] = marks, device: torch.device = devices[name]) -> None:
                if self.module.trainer.training:
                    marks.append(time_mark(device))

            part = self.module.get_submodule(name)
            self.stages.hooks += [part.register_forward_pre_hook(mark), part.register_forward_hook(mark, prepend=True)]

    def _seconds(self) -> dict[str, float]:
        """Seconds per step by part, of its fastest pass: all else that runs only adds to it."""
        found: dict[str, float] = {}
        for name, marks in self._marks.items():
            spans = [seconds_between(start, end) for start, end in zip(marks[::2], marks[1::2], strict=True)]
            found[name] = min(spans, default=0.0) * len(spans) / (_LAST - _FIRST)
        return found

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
            f"balance=time: milliseconds of a step's forward passes by stage, {_stage_ms(before, work, weights)} "
            f"as it was cut by memory, {_stage_ms(plan, work, weights)} now: {' | '.join(stages.lines())}"
        )


def _stage_ms(plan: StagePlan, work: dict[str, float], weights: Sequence[float]) -> str:
    seconds = [
        sum(work[name] for name, where in plan.stage_of.items() if where == stage) / weight
        for stage, weight in enumerate(weights)
    ]
    return " ".join(f"{second * 1e3:.2f}" for second in seconds)
