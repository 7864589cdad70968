"""Divide every global batch among ranks by fixed or measured shares."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
import torch
from torch.utils.hooks import RemovableHandle

from ..batch.policies import Even, Policy, Weighted
from ..core.devices import seconds_between, time_mark
from .checkpointed import KeptController
from .controller import BalanceController

Weights: TypeAlias = Sequence[float] | Literal["auto"]
"""Share of each rank, in any unit (samples per second, for example), or `auto`."""

FIRST_STEPS, THEN_EVERY = 12, 20
"""Number of first steps that are measured; then one step in as many."""


Change: TypeAlias = Callable[[Policy, int], None]
"""Has global batches divided by another policy, from the one of that number on."""


@dataclass
class RankTimer:
    """Measures one rank's own work in a step, without the wait for other ranks.

    The forward pass is timed inside DDP's wrapper; the backward pass until its last gradient is ready, before DDP waits
    for the gradients of other ranks.

    Args:
        device: its device; on an accelerator, device events measure the time.
    """

    module: pl.LightningModule
    device: torch.device
    _marks: list[float | torch.Event] = field(default_factory=list["float | torch.Event"], init=False)
    _last: float | torch.Event | None = field(default=None, init=False)
    _hooks: list[RemovableHandle] = field(default_factory=list[RemovableHandle], init=False)

    @contextmanager
    def forward(self) -> Generator[None]:
        """Measure the block, which runs the module's training step."""
        self._marks.append(self._now())
        yield
        self._marks.append(self._now())

    def begin_backward(self) -> None:
        """Measure from here until the last gradient is ready."""
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._note_ready) for parameter in parameters]
        self._marks.append(self._now())

    def finish_backward(self) -> None:
        """End the measurement."""
        for hook in self._hooks:
            hook.remove()
        self._marks.append(self._last if self._last is not None else self._now())

    def seconds(self) -> float:
        """Seconds of both passes; on an accelerator this waits until both have finished."""
        starts, ends = self._marks[0::2], self._marks[1::2]
        return sum(seconds_between(start, end) for start, end in zip(starts, ends, strict=True))

    def _now(self) -> float | torch.Event:
        return time_mark(self.device)

    def _note_ready(self, parameter: torch.Tensor) -> None:
        self._last = self._now()


class RankBalance:
    """How ranks share a global batch; with `auto` it measures, and agrees with the other ranks.

    Args:
        strategy: name of the strategy, which begins messages.
        weights: share of each rank, or `auto`; None for even ones.
        hysteresis: fraction of the slowest rank's time that new shares must save to be adopted.
    """

    def __init__(self, strategy: str, weights: Weights | None = None, hysteresis: float = 0.0) -> None:
        self.kept = KeptController(strategy, "ranks")
        self._strategy = strategy
        self._weights = weights
        self._hysteresis = hysteresis
        self._timer: RankTimer | None = None
        self._exchanged: list[list[float]] | None = None
        self._num_steps = 0

    @property
    def policy(self) -> Policy:
        """The policy that divides the next global batch."""
        if self._weights is not None and not isinstance(self._weights, str):
            return Weighted(tuple(self._weights))
        controller = self.kept.controller
        return Even() if controller is None else Weighted(tuple(controller.shares))

    def begin(self, num_ranks: int) -> None:
        """Begin a run."""
        if isinstance(self._weights, str):
            self.kept.begin(num_ranks, lambda: BalanceController(num_ranks, hysteresis=self._hysteresis))
        else:
            self.policy.verify(num_ranks, self._strategy)

    def regroup(self, kept: Sequence[int]) -> None:
        """Go on with some of the ranks; measured shares are measured again."""
        if self._timer is not None:
            self._timer.finish_backward()
        self._timer = self._exchanged = None
        if isinstance(self._weights, str):
            self._num_steps = 0
        elif self._weights is not None:
            self._weights = [self._weights[rank] for rank in kept]
        self.begin(len(kept))

    def begin_step(self, module: pl.LightningModule, device: torch.device, change: Change) -> None:
        """Adopt what ranks have exchanged, log the shares, and decide whether to measure the step."""
        controller = self.kept.controller
        if controller is None:
            return
        self._adopt(controller, change)
        log_shares(module, partial(_of_time, controller), rank_zero_only=True)
        if self._num_steps < FIRST_STEPS or self._num_steps % THEN_EVERY == 0:
            self._timer = RankTimer(module, device)
        self._num_steps += 1

    def forward(self) -> AbstractContextManager[None]:
        """Measure the block, if this step is measured."""
        return nullcontext() if self._timer is None else self._timer.forward()

    def begin_backward(self) -> None:
        """Measure until the last gradient is ready."""
        if self._timer is not None:
            self._timer.begin_backward()

    def finish_backward(self, num: float, exchange: Callable[[float, float], list[list[float]]]) -> None:
        """Send this rank's samples and seconds to all ranks, if this step is measured.

        Args:
            exchange: exchanges both; returns them rank by rank, each with how many global batches the rank has cut.
        """
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.finish_backward()
            self._exchanged = exchange(num, timer.seconds())

    def _adopt(self, controller: BalanceController, change: Change) -> None:
        """Pass the exchanged values to the controller, which decides the same on all ranks."""
        if self._exchanged is None:
            return
        nums, seconds, nums_cut = zip(*self._exchanged, strict=True)
        self._exchanged = None
        if controller.observe([int(num) for num in nums], seconds):
            # a sampler cuts at most one more batch between the exchange and here; `change` would detect two
            change(Weighted(tuple(controller.shares)), int(max(nums_cut)) + 2)


def _of_time(controller: BalanceController) -> dict[str, float]:
    return {name: value for name, value in controller.metrics().items() if "bytes" not in name}


def log_shares(module: pl.LightningModule, values: Callable[[], Mapping[str, float]], **options: Any) -> None:
    """Log shares and what they were computed of, in the steps that log."""
    trainer: Any = module.trainer
    if trainer.loggers and trainer._logger_connector.should_update_logs:
        for name, value in values().items():
            module.log(name, value, on_step=True, on_epoch=False, batch_size=1, **options)
