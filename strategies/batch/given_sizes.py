"""The `batch_size` with which parts of a batch log a value: one constant for the whole batch, or each part's own size.

`self.log(..., batch_size=self.hparams.batch_size)` gives every part the number of the whole batch, and
`batch_size=len(x)` its own. One device sees a single call per batch: of the constant, or of the sum.

    given by parts of 3 and 1 samples     means            value of the batch       weight of the batch
    4 and 4                               a constant       mean by samples          4
    3 and 1, or 70 and 20 (tokens)        sizes of parts   mean by these sizes      their sum
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_fabric.utilities.rank_zero import rank_zero_warn


class GivenSize(int):
    """A weight of a whole batch, for `self.log(batch_size=...)`, which remembers what its parts gave.

    Attributes:
        each: what every part gave; None if they gave different numbers, or if these are known to be sizes.
    """

    each: int | None

    def __new__(cls, total: int, each: int | None = None) -> "GivenSize":
        """Make the number `total`."""
        size = super().__new__(cls, total)
        size.each = each
        return size


def constant_of(given: Any) -> int | None:
    """What `batch_size` is if it is a constant for the whole batch; None if it can't be one."""
    if isinstance(given, GivenSize):
        return given.each
    return given if isinstance(given, int) else None


@dataclass
class _Key:
    """What is known of one logged key.

    Args:
        size: samples of the first part that logged it.
        given: the `batch_size` that this part gave.
        parts: how many parts logged it in the first batch, whose weight is their sum until more is known.
        constant: whether a constant is given; None as long as all parts had one size and gave one number.
        told: whether the user was told of a batch that weighs more or less depending on it.
    """

    size: int
    given: int
    parts: int
    constant: bool | None = None
    told: bool = False

    @property
    def is_constant(self) -> bool:
        """Whether a constant is given, by what is known; the size of the first batch is more likely a constant."""
        return self.given == self.size * self.parts != self.size if self.constant is None else self.constant

    def warn(self, name: str) -> None:
        """Tell once that a batch weighs more or less depending on what can't be found out.

        A number that is the size of every part is no constant of the whole batch, unless it is 1.
        """
        if not self.told and (self.given != self.size or self.given == 1):
            rank_zero_warn(
                f"self.log({name!r}, batch_size={self.given}): all parts of the batches so far had {self.size} samples "
                f"and gave {self.given}, but batches differ in their number of parts, so that a constant for the whole "
                "batch can't be told from the size of a part, and their mean depends on it. It is taken for "
                f"{'a constant' if self.is_constant else 'the size'}. If it is not, leave batch_size out."
            )
        self.told = True

    def learn(self, sizes: Sequence[int], given: Sequence[int]) -> None:
        """Decide, once, by the first part that differs from the first one."""
        if self.constant is None and any(number != self.given for number in given):
            self.constant = False
        elif self.constant is None and any(size != self.size for size in sizes):
            self.constant = True


class GivenSizes:
    """Tells constants from sizes, key by key; what was decided for a key is kept."""

    def __init__(self) -> None:
        self._keys: dict[Hashable, _Key] = {}

    def weigh(
        self, key: Hashable, name: str, sizes: Sequence[int], given: Sequence[int]
    ) -> tuple[Sequence[int], GivenSize]:
        """Weigh the parts of one batch that logged a value with `batch_size`.

        Args:
            key: identifies the call of `self.log`.
            name: what it logs.
            sizes: samples per part.
            given: `batch_size` per part.

        Returns:
            The weight of each part in the value of the batch, and the weight of the batch.
        """
        known = self._keys.setdefault(key, _Key(sizes[0], given[0], len(sizes)))
        known.learn(sizes, given)
        is_one = known.constant is not False and all(number == given[0] for number in given)
        each = given[0] if is_one else None
        if known.constant is None and len(given) != known.parts:
            known.warn(name)
        if not any(given):  # nothing is counted: no token, say
            return sizes, GivenSize(0, each)
        if not known.is_constant or each is None:
            return given, GivenSize(sum(given), each)
        # batches whose parts could not be told apart had the sum of so many constants
        return sizes, GivenSize(each * known.parts, each)
