"""Keep what a balanced strategy has measured across runs and in checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pytorch_lightning.utilities.rank_zero import rank_zero_info

from .controller import BalanceController

CHECKPOINT_KEY = "balance"


@dataclass
class KeptController:
    """Keeps the controller of a balanced strategy, whose name begins messages; `part` is `devices` or `ranks`."""

    strategy: str
    part: str
    controller: BalanceController | None = field(default=None, init=False)
    """Holds measurements and shares; None if nothing is measured."""
    _restored: dict[str, Any] | None = field(default=None, init=False)

    def begin(self, num_parts: int, make: Callable[[], BalanceController]) -> BalanceController:
        """Continue with the controller of an earlier run or of a checkpoint, or make one for as many parts."""
        if self.controller is None or len(self.controller.shares) != num_parts:
            self.controller = make()
        if self._restored is not None and not self.controller.load_state_dict(self._restored):
            rank_zero_info(
                f"{self.strategy}: the checkpoint was balanced for another number of {self.part}; measuring again."
            )
        self._restored = None
        return self.controller

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add the measurements to a checkpoint that is about to be written."""
        if self.controller is not None:
            checkpoint[CHECKPOINT_KEY] = self.controller.state_dict()

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep the measurements of a checkpoint for the next run."""
        self._restored = checkpoint.get(CHECKPOINT_KEY)
