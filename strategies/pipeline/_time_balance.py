"""Move the cut between stages once, to where they take the same time, measured in the first steps of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..core.devices import precise_dtype, seconds_between, time_mark
from ..core.errors import ConfigError
from ..core.optimizer_states import state_to_parameters
from ._plan import StagePlan, balanced_plan
from .stages import Stages

_FIRST, _LAST = 1, 4
"""Optimizer steps after which measuring begins and ends: the first one prepares memory and kernels."""


class PartTimes:
    """Measures how long each part of a module works for a micro-batch, while these run one after the other.

    A part works from where it is entered until another one is: forward where it is called, backward where the gradients
    of its outputs arrive, and the part before it where those of its inputs do. What is between two parts counts forward
    for the first one.

    Args:
        module: the placed module.
        device_of: device by name of the parts that are modules.
    """

    def __init__(self, module: nn.Module, device_of: Mapping[str, torch.device]) -> None:
        self._device_of = device_of
        self._part: str | None = None
        self._start: Any = None
        self._spans: list[tuple[str, Any, Any]] = []
        self._microbatches: list[list[tuple[str, Any, Any]]] = []
        self._hooks: list[Any] = []
        for name in device_of:
            part = module.get_submodule(name)
            self._hooks.append(part.register_forward_pre_hook(partial(self._call, name), with_kwargs=True))
            self._hooks.append(part.register_forward_hook(partial(self._leave, name), prepend=True))

    def begin_microbatch(self) -> None:
        """Drop what was measured since the last micro-batch, such as validation."""
        self._spans, self._part = [], None

    def end_microbatch(self) -> None:
        """Keep what was measured."""
        self._enter(None)
        self._microbatches.append(self._spans)

    def seconds(self) -> dict[str, float]:
        """Seconds per micro-batch by part: the least measured, since all else that runs only adds to it."""
        totals: dict[str, list[float]] = {name: [] for name in self._device_of}
        for spans in self._microbatches:
            sums = dict.fromkeys(totals, 0.0)
            for name, start, end in spans:
                sums[name] += seconds_between(start, end)
            for name, seconds in sums.items():
                totals[name].append(seconds)
        return {name: min(found, default=0.0) for name, found in totals.items()}

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _call(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._enter_backward((args, kwargs), self._part)
        self._enter(name)

    def _leave(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        self._enter_backward(output, name)

    def _enter_backward(self, value: Any, name: str | None) -> None:
        def enter(_: Tensor) -> None:
            self._enter(name)

        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None and torch.is_grad_enabled():
                leaf.register_hook(enter)

    def _enter(self, name: str | None) -> None:
        if name == self._part:
            return
        if self._part is not None:
            self._spans.append((self._part, self._start, time_mark(self._device_of[self._part])))
        self._part, self._start = name, None if name is None else time_mark(self._device_of[name])


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
