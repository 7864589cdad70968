"""DDP for ranks of unequal speed: divides every global batch by fixed or measured shares."""

from typing import Any

from .balance.controller import Hysteresis
from .balance.ranks import RankBalance, Weights
from .core.errors import ConfigError
from .core.options import checked
from .ddp import DDPStrategy


class BalancedDDPStrategy(DDPStrategy):
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

    @checked
    def __init__(self, weights: Weights = "auto", hysteresis: Hysteresis = 0.05, **options: Any) -> None:
        super().__init__(**divided(options))
        self.balance = RankBalance(self.strategy_name, weights, hysteresis)


def divided(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `DDPStrategy` for batches that are divided; refuse the one value that divides nothing."""
    if options.get("batch_size_is", "global") != "global":
        raise ConfigError(
            "balanced_ddp: batch_size_is=per_device was given, but the batch is always divided. Remove the option."
        )
    return {**options, "batch_size_is": "global"}
