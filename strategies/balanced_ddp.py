"""DDP for ranks of unequal speed: divides every global batch by fixed or measured shares."""

from typing import Any

from typing_extensions import Unpack

from .balance.controller import Hysteresis
from .balance.ranks import RankBalance, Weights
from .core.errors import ConfigError
from .core.options import checked
from .ddp import DDPStrategy
from .ranks.arguments import DDPArguments


class BalancedDDPArguments(DDPArguments, total=False):
    """Options of `DDPStrategy` that `BalancedDDPStrategy` passes on."""

    devices_per_process: int


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
    def __init__(
        self, weights: Weights = "auto", hysteresis: Hysteresis = 0.05, **options: Unpack[BalancedDDPArguments]
    ) -> None:
        given: dict[str, Any] = {**options}
        verify_divides(given.pop("batch_size_is", "global"))
        super().__init__(batch_size_is="global", **given)
        self.balance = RankBalance(self.strategy_name, weights, hysteresis)


def verify_divides(batch_size_is: str) -> None:
    """Refuse the one value of `batch_size_is` with which there is nothing to divide."""
    if batch_size_is != "global":
        raise ConfigError(
            "balanced_ddp: batch_size_is=per_device was given, but the batch is always divided. Remove the option."
        )
