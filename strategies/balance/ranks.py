"""Divide every global batch among ranks by fixed or measured shares."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
import torch

from ..batch.policies import Even, Policy, Weighted
from ..core.devices import seconds_between, time_mark
from .controller import BalanceController

Weights: TypeAlias = Sequence[float] | Literal["auto"]
"""Share of each rank, in any unit (samples per second, for example), or `auto`."""

FIRST_STEPS, THEN_EVERY = 12, 20
"""Number of first steps that are measured; then one step in as many."""


class RankBalance:
    """How ranks share a global batch; with `auto` it measures, and agrees with the other ranks.

    Args:
        weights: share of each rank, or `auto`; None for even ones.
        hysteresis: fraction of the slowest rank's time that new shares must save to be adopted.
    """

    def __init__(self, strategy: str, weights: Weights | None = None, hysteresis: float = 0.0) -> None:
        self.controller = BalanceController(hysteresis) if isinstance(weights, str) else None
        self._strategy = strategy
        self._weights = None if isinstance(weights, str) else weights
        self._forget()

    def _forget(self) -> None:
        self._is_measured, self._num_steps = False, 0
        self._span: tuple[Any, Any] | None = None
        """Where the forward pass of the step that is measured begins and ends."""
        self._exchanged: list[list[float]] | None = None

    @property
    def policy(self) -> Policy:
        """The policy that divides the next global batch."""
        if self.controller is not None:
            return self.controller.policy
        return Even() if self._weights is None else Weighted(tuple(self._weights))

    def begin(self, num_ranks: int) -> None:
        """Begin a run."""
        if self.controller is not None:
            self.controller.begin(num_ranks)
        self.policy.verify(num_ranks, self._strategy)

    def regroup(self, kept: Sequence[int]) -> None:
        """Go on with some of the ranks; measured shares are measured again."""
        self._forget()
        if self._weights is not None:
            self._weights = [self._weights[rank] for rank in kept]
        self.begin(len(kept))

    def begin_step(self, module: pl.LightningModule, change: Callable[[Policy, int], None]) -> None:
        """Adopt what ranks have exchanged, log the shares, and decide whether to measure the step.

        Args:
            change: has global batches divided by another policy, from the one of that number on.
        """
        controller, self._span = self.controller, None
        if controller is None:
            return
        if self._exchanged is not None:  # the controllers of all ranks decide the same
            nums, seconds, nums_cut = zip(*self._exchanged, strict=True)
            self._exchanged = None
            if controller.observe([int(num) for num in nums], seconds):
                # a sampler cuts at most one more batch between the exchange and here; `change` would detect two
                change(controller.policy, int(max(nums_cut)) + 2)
        log_shares(module, controller.metrics, rank_zero_only=True)
        self._is_measured = self._num_steps < FIRST_STEPS or self._num_steps % THEN_EVERY == 0
        self._num_steps += 1

    @contextmanager
    def forward(self, device: torch.device) -> Generator[None]:
        """Measure the block, which runs the training step on a device, if this step is measured.

        It runs inside DDP's wrapper, where nothing waits for other ranks.
        """
        start = time_mark(device) if self._is_measured else None
        yield
        if start is not None:
            self._is_measured, self._span = False, (start, time_mark(device))

    def finish_backward(self, num: float, exchange: Callable[[float, float], list[list[float]]]) -> None:
        """Send this rank's samples and seconds to all ranks, if this step was measured.

        Args:
            exchange: exchanges both; returns them rank by rank, each with how many global batches the rank has cut.
        """
        if self._span is not None:
            span, self._span = self._span, None
            self._exchanged = exchange(num, seconds_between(*span))  # on an accelerator this waits for the step


def log_shares(module: pl.LightningModule, values: Callable[[], Mapping[str, float]], **options: Any) -> None:
    """Log shares and what they were computed of, in the steps that log."""
    trainer: Any = module.trainer
    if trainer.loggers and trainer._logger_connector.should_update_logs:
        for name, value in values().items():
            module.log(name, value, on_step=True, on_epoch=False, batch_size=1, **options)
