"""Divide every global batch among ranks by fixed or measured shares."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeAlias

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.distributed import Work

from ..batch.policies import Even, Policy, Weighted
from ..core.private import of_lightning
from .checkpointed import KeptController
from .controller import BalanceController
from .rank_timer import RankTimer

Weights: TypeAlias = Sequence[float] | Literal["auto"]
"""Share of each rank, in any unit (samples per second, for example), or `auto`."""

FIRST_STEPS, THEN_EVERY = 12, 20
"""Number of first steps that are measured; then one step in as many."""


class Cut(Protocol):
    """Cuts global batches among ranks; its policy may change."""

    num_cut: int

    def change(self, policy: Policy, at: int) -> None:
        """Use another policy from a global batch on."""
        ...


class Loaders(Protocol):
    """Makes a rank's loaders."""

    rank: int
    num_ranks: int
    sum_over_ranks: Callable[[Tensor], Work]

    @property
    def divides(self) -> Sequence[Cut]:
        """The cuts made for training."""
        ...


class RankBalance:
    """The policy of the balanced DDP strategies; with `auto` it measures, and agrees with the other ranks.

    Args:
        strategy: name of the strategy, which begins messages.
        weights: share of each rank, or `auto`.
        hysteresis: fraction of the slowest rank's time that new shares must save to be adopted.
    """

    def __init__(self, strategy: str, weights: Weights, hysteresis: float) -> None:
        self.kept = KeptController(strategy, "ranks")
        self._strategy = strategy
        self._weights = weights
        self._hysteresis = hysteresis
        self._timer: RankTimer | None = None
        self._exchanged: Tensor | None = None
        self._num_steps = 0

    @property
    def policy(self) -> Policy:
        """The policy that divides the next global batch."""
        if not isinstance(self._weights, str):
            return Weighted(tuple(self._weights))
        controller = self.kept.controller
        return Even() if controller is None else Weighted(tuple(controller.shares))

    def begin(self, num_ranks: int) -> None:
        """Begin a run."""
        if isinstance(self._weights, str):
            self.kept.begin(num_ranks, lambda: BalanceController(num_ranks, hysteresis=self._hysteresis))
        else:
            self.policy.verify(num_ranks, self._strategy)

    def begin_step(self, module: pl.LightningModule, device: torch.device, cuts: Sequence[Cut]) -> None:
        """Adopt what ranks have exchanged, log the shares, and decide whether to measure the step."""
        controller = self.kept.controller
        if controller is None:
            return
        self._adopt(controller, cuts)
        _log(controller, module)
        if self._num_steps < FIRST_STEPS or self._num_steps % THEN_EVERY == 0:
            self._timer = RankTimer(module, device)
        self._num_steps += 1

    @contextmanager
    def forward(self) -> Generator[None]:
        """Measure the block, if this step is measured."""
        if self._timer is None:
            yield
            return
        with self._timer.forward():
            yield

    def begin_backward(self) -> None:
        """Measure until the last gradient is ready."""
        if self._timer is not None:
            self._timer.begin_backward()

    def finish_backward(self, num: float, loaders: Loaders) -> None:
        """Send this rank's samples and seconds, and its sampler's position, to all ranks."""
        timer, self._timer = self._timer, None
        if timer is None:
            return
        timer.finish_backward()
        table = torch.zeros(loaders.num_ranks, 3, dtype=torch.float64)
        num_cut = max((cut.num_cut for cut in loaders.divides), default=0)
        table[loaders.rank] = torch.tensor([num, timer.seconds(), num_cut])
        loaders.sum_over_ranks(table).wait()
        self._exchanged = table

    def _adopt(self, controller: BalanceController, cuts: Sequence[Cut]) -> None:
        """Pass the exchanged values to the controller, which decides the same on all ranks."""
        if self._exchanged is None:
            return
        table, self._exchanged = self._exchanged.tolist(), None
        sizes = [int(row[0]) for row in table]
        if controller.observe(sizes, [row[1] for row in table]):
            # a sampler cuts at most one more batch between the exchange and here; `change` would detect two
            first = max(int(row[2]) for row in table) + 2
            for cut in cuts:
                cut.change(Weighted(tuple(controller.shares)), first)


def _log(controller: BalanceController, module: pl.LightningModule) -> None:
    trainer: Any = module.trainer
    if not trainer.loggers or not of_lightning.logger_connector(trainer).should_update_logs:
        return
    for name, value in controller.metrics().items():
        if "bytes" not in name:
            module.log(name, value, on_step=True, on_epoch=False, batch_size=1, rank_zero_only=True)
