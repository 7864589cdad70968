"""Wait for all ranks, and name those that do not arrive."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import Store

from .store import RankError, wait_for

_TOGETHER, _APART = b"together", b"apart"


@dataclass
class Barrier:
    """Makes ranks wait for each other at named places.

    Rank 0 waits for all others, and these wait for its word: one rank asks the store for all, not each of them.
    """

    store: Store
    rank: int
    num_ranks: int
    timeout_s: float
    describe: Callable[[int], str]
    _count: int = 0

    def wait(self, place: str) -> None:
        """Wait until all ranks have reached this place; an error names one that has not, or is at another."""
        self._count += 1
        if missing := self._meet(f"meeting/{self._count}", place):
            raise RankError(self._absence(place, missing))
        if self.store.get(f"meeting/{self._count}/met") == _APART:
            raise RankError(self._apart(place))
        if self._count > 2:  # all ranks that are here have left the barrier before the last
            self.store.delete_key(f"meeting/{self._count - 2}/{self.rank}")
            if self.rank == 0:
                self.store.delete_key(f"meeting/{self._count - 2}/met")

    def join(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until all ranks have joined; what `meanwhile` raises ends the wait."""
        if missing := self._meet("joined", "", meanwhile):
            ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
            raise RankError(
                f"{ranks} did not join within {self.timeout_s:g} s ({self.num_ranks - len(missing)} of "
                f"{self.num_ranks} did). See the output of that process; if it only needs more time to start, raise "
                "strategy.timeout_s."
            )

    def _meet(self, key: str, value: str, meanwhile: Callable[[], None] = lambda: None) -> list[int]:
        """Wait for all ranks, and return those that did not come; rank 0 tells whether all gave one value."""
        self.store.set(f"{key}/{self.rank}", value)
        keys = self._keys(key)
        if self.rank == 0:
            if missing := wait_for(self.store, keys, self.timeout_s, meanwhile):
                return [keys.index(one) for one in missing]
            self.store.set(f"{key}/met", (_TOGETHER if len(set(self.store.multi_get(keys))) == 1 else _APART).decode())
        elif wait_for(self.store, [f"{key}/met"], self.timeout_s, meanwhile):
            return [rank for rank, one in enumerate(keys) if not self.store.check([one])] or [0]
        return []

    def _keys(self, key: str) -> list[str]:
        return [f"{key}/{rank}" for rank in range(self.num_ranks)]

    def _apart(self, place: str) -> str:
        places = [other.decode() for other in self.store.multi_get(self._keys(f"meeting/{self._count}"))]
        where = ", ".join(f"rank {rank} is at {other!r}" for rank, other in enumerate(places) if other != place)
        return (
            f"rank {self.rank} waits at {place!r}, but {where}. All ranks must reach the same places in the same order."
        )

    def _absence(self, place: str, missing: list[int]) -> str:
        where = "; ".join(f"rank {rank} did not arrive{self.describe(rank)}" for rank in missing)
        return (
            f"rank {self.rank} waited {self.timeout_s:g} s at {place!r}: {where}. All ranks must take part "
            "in collective operations (saving a checkpoint, ending an epoch)."
        )
