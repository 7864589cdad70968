"""DDP for ranks of unequal speed: divides every global batch by fixed or measured shares."""

from collections.abc import Sequence
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from .balance.checkpointed import CheckpointedBalance
from .balance.controller import BalanceController
from .balance.rank_timer import RankTimer
from .batch.policies import Even, Policy, Weighted
from .core.errors import ConfigError
from .ddp import DDPStrategy

FIRST_STEPS, THEN_EVERY = 12, 20
"""Number of first steps that are measured; then one step in as many."""


class BalancedDDPStrategy(CheckpointedBalance, DDPStrategy):
    """`DDPStrategy` that divides each global batch, which is the loader's batch, among the ranks by weights.

    Gradients stay exact, because each rank's is weighted by its samples. With `auto` each rank measures the time of its
    own forward and backward passes, without the wait for others; the ranks exchange these (a few numbers, in one step
    of twenty) and change their shares at the same global batch. Shares are logged as `balance/...` and saved in
    checkpoints.

    Args:
        weights: share of each rank, in any unit (samples per second, for example), or `auto`.
        hysteresis: fraction of the slowest rank's time that new shares must save to be adopted.
        **options: options of `DDPStrategy`, except `batch_size_is`.

    Raises:
        ConfigError: an option has an invalid value.
    """

    strategy_name = "balanced_ddp"

    def __init__(
        self, weights: Sequence[float] | Literal["auto"] = "auto", hysteresis: float = 0.05, **options: Any
    ) -> None:
        if options.pop("batch_size_is", "global") != "global":
            raise ConfigError(
                "balanced_ddp: batch_size_is=per_device was given, but the batch is always divided. Remove the option."
            )
        if isinstance(weights, str) and weights != "auto":
            raise ConfigError(f"balanced_ddp: weights={weights} is unknown. Give a list of numbers, or auto.")
        super().__init__(batch_size_is="global", **options)
        BalanceController(1, hysteresis=hysteresis)  # validates the option
        self.weights = weights
        self.hysteresis = hysteresis
        self._timer: RankTimer | None = None
        self._exchanged: Tensor | None = None
        self._num_steps = 0

    @property
    @override
    def policy(self) -> Policy:
        if not isinstance(self.weights, str):
            return Weighted(tuple(self.weights))
        return Even() if self.controller is None else Weighted(tuple(self.controller.shares))

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if not isinstance(self.weights, str):
            Weighted(tuple(self.weights)).verify(self.world_size, self.strategy_name)
        else:
            num = self.world_size
            self.keep_controller(num, lambda: BalanceController(num, hysteresis=self.hysteresis), "ranks")
        super().setup(trainer)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self.controller is None:
            return super().training_step(*args, **kwargs)
        self._adopt(self.controller)
        self._log(self.controller)
        measured = self._num_steps < FIRST_STEPS or self._num_steps % THEN_EVERY == 0
        self._num_steps += 1
        if not measured:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        self._timer = RankTimer(self.lightning_module, self.root_device)
        with self._timer.forward():
            return super().training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        timer, self._timer = self._timer, None
        if timer is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        with timer.backward():
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._exchange(timer.seconds())
        return loss

    def _exchange(self, seconds: float) -> None:
        """Send this rank's samples and seconds, and its sampler's position, to all ranks."""
        num = 0.0 if self._share is None else self._share.num
        num_cut = max((divide.num_cut for divide in self.loaders.divides), default=0)
        table = torch.zeros(self.world_size, 3, dtype=torch.float64)
        table[self.global_rank] = torch.tensor([num, seconds, num_cut])
        self.loaders.sum_over_ranks(table).wait()
        self._exchanged = table

    def _adopt(self, controller: BalanceController) -> None:
        """Pass the exchanged values to the controller, which decides the same on all ranks."""
        if self._exchanged is None:
            return
        table, self._exchanged = self._exchanged.tolist(), None
        sizes = [int(row[0]) for row in table]
        if controller.observe(sizes, [row[1] for row in table]):
            # a sampler cuts at most one more batch between the exchange and here; `change` would detect two
            first = max(int(row[2]) for row in table) + 2
            for divide in self.loaders.divides:
                divide.change(Weighted(tuple(controller.shares)), first)

    def _log(self, controller: BalanceController) -> None:
        module = self.lightning_module
        assert module is not None
        if not module.trainer.loggers or not module.trainer._logger_connector.should_update_logs:
            return
        for name, value in controller.metrics().items():
            if "bytes" not in name:
                module.log(name, value, on_step=True, on_epoch=False, batch_size=1, rank_zero_only=True)
