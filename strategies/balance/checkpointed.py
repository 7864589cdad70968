"""Keep what a balanced strategy has measured across runs and in checkpoints."""

from collections.abc import Callable
from typing import Any

import pytorch_lightning.strategies as pl_strategies
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from .controller import BalanceController

CHECKPOINT_KEY = "balance"
"""Checkpoint key of the measurements."""


class CheckpointedBalance(pl_strategies.Strategy):
    """Mixin for a balanced strategy that keeps its controller; the strategy itself measures.

    Attributes:
        controller: holds measurements and shares; None if nothing is measured.
    """

    strategy_name: str
    controller: BalanceController | None = None
    _restored: dict[str, Any] | None = None

    def keep_controller(self, num_parts: int, make: Callable[[], BalanceController], part: str) -> BalanceController:
        """Continue with the controller of an earlier run or of a checkpoint, or make one.

        Args:
            num_parts: current number of devices or ranks.
            make: makes a controller without measurements.
            part: `devices` or `ranks`, for the message.

        Returns:
            The controller, which is also `self.controller`.
        """
        if self.controller is None or len(self.controller.shares) != num_parts:
            self.controller = make()
        if self._restored is not None and not self.controller.load_state_dict(self._restored):
            rank_zero_info(
                f"{self.strategy_name}: the checkpoint was balanced for another number of {part}; measuring again."
            )
        self._restored = None
        return self.controller

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.controller is not None:
            checkpoint[CHECKPOINT_KEY] = self.controller.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._restored = checkpoint.get(CHECKPOINT_KEY)
        return checkpoint
