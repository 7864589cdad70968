"""Read this rank's share of each batch, by which its loss and its logged means weigh."""

from collections.abc import Iterable
from typing import Any

from ..core.errors import ConfigError
from .combined import TRAINED, verify_side_by_side
from .loaders import next_share
from .sampling import Share


class RankShares:
    """This rank's share of the current batch.

    Args:
        strategy: name that begins messages.
    """

    def __init__(self, num_ranks: int, strategy: str) -> None:
        self.current: Share | None = None
        """The share; None if all ranks have the same weight."""
        self._num_ranks = num_ranks
        self._strategy = strategy
        self._parts: set[float] = set()
        self._knows_parts = False

    @property
    def counts(self) -> bool:
        """Whether this rank has samples of the batch."""
        return self.current is None or self.current.num > 0

    @property
    def weight(self) -> float:
        """What turns a mean over ranks into a mean over samples, when each rank's value is multiplied by it."""
        share = self.current
        return 1.0 if share is None else self._num_ranks * share.num / share.total

    def read(self, loaders: Iterable[Any]) -> None:
        """Take the shares of the batch that was fetched from one loader, or from several side by side."""
        shares = [share for share in map(next_share, loaders) if share is not None]
        self.current = shares[0] if shares else None
        self._parts = {share.num / share.total for share in shares}

    def begin_training(self) -> None:
        """Look at the training loaders again, which may be other ones."""
        self._knows_parts = False

    def verify_evaluation(self, combined: Any) -> None:
        """Refuse combined loaders whose batches ranks would not read side by side."""
        verify_side_by_side(combined, self._strategy)

    def verify_parts(self, combined: Any, max_batches: float) -> None:
        """Refuse training loaders of which this rank has unequal parts, in any step where that can be known.

        Args:
            combined: the loop's loader.
            max_batches: number of batches after which an epoch ends.

        Raises:
            ConfigError: the parts differ, so that no weight of this rank's loss is right.
        """
        if not self._knows_parts:
            verify_side_by_side(combined, self._strategy, TRAINED, max_batches)
            self._knows_parts = True
        if len(self._parts) > 1:
            raise ConfigError(
                f"{self._strategy}: this rank has {' and '.join(f'{part:.3g}' for part in sorted(self._parts))} of "
                f"the batches of the loaders that are read side by side, {TRAINED}"
            )
