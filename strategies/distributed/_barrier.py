"""Wait for all ranks, and name those that do not arrive."""

from collections.abc import Callable

from torch.distributed import Store

from .store import RankError, wait_for

_TOGETHER, _APART = b"together", b"apart"


class Barrier:
    """Makes ranks wait for each other at named places.

    Rank 0 waits for all others, and these wait for its word: one rank asks the store for all, not each of them.

    Args:
        timeout_s: seconds to wait for the others.
        describe: describes where a missing rank is.
    """

    def __init__(
        self, store: Store, rank: int, num_ranks: int, timeout_s: float, describe: Callable[[int], str] | None = None
    ) -> None:
        self.store = store
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self.describe = describe or _unknown
        self._count = 0

    def wait(self, place: str) -> None:
        """Wait until all ranks have reached this place.

        Raises:
            RankError: a rank did not arrive in time, or is at another place; the message names it.
        """
        self._count += 1
        self.store.set(self._key(self._count, self.rank), place)
        met = f"meeting/{self._count}/met"
        if self.rank == 0:
            self._collect(place, met)
        elif wait_for(self.store, [met], self.timeout_s):
            raise RankError(self._absence(place, self._missing() or [0]))
        if self.store.get(met) == _APART:
            raise RankError(self._apart(place))
        if self._count > 2:  # all ranks that are here have left the barrier before the last
            self.store.delete_key(self._key(self._count - 2, self.rank))
            if self.rank == 0:
                self.store.delete_key(f"meeting/{self._count - 2}/met")

    def _collect(self, place: str, met: str) -> None:
        """Wait for all ranks, as rank 0 alone does, and tell the others whether they are at one place."""
        if missing := wait_for(self.store, self._keys(), self.timeout_s):
            raise RankError(self._absence(place, [self._keys().index(key) for key in missing]))
        self.store.set(met, (_TOGETHER if len(set(self._places())) == 1 else _APART).decode())

    def _keys(self) -> list[str]:
        return [self._key(self._count, rank) for rank in range(self.num_ranks)]

    def _places(self) -> list[bytes]:
        return self.store.multi_get(self._keys())

    def _missing(self) -> list[int]:
        return [rank for rank, key in enumerate(self._keys()) if not self.store.check([key])]

    def _apart(self, place: str) -> str:
        places = [other.decode() for other in self._places()]
        where = ", ".join(f"rank {rank} is at {other!r}" for rank, other in enumerate(places) if other != place)
        return (
            f"rank {self.rank} waits at {place!r}, but {where}. All ranks must reach the same places in the same order."
        )

    def _key(self, count: int, rank: int) -> str:
        return f"meeting/{count}/{rank}"

    def _absence(self, place: str, missing: list[int]) -> str:
        where = "; ".join(f"rank {rank} did not arrive{self.describe(rank)}" for rank in missing)
        return (
            f"rank {self.rank} waited {self.timeout_s:g} s at {place!r}: {where}. All ranks must take part "
            "in collective operations (saving a checkpoint, ending an epoch)."
        )


def join(store: Store, rank: int, num_ranks: int, timeout_s: float) -> None:
    """Wait until all ranks have joined.

    Raises:
        RankError: some did not join in time; the message names them.
    """
    store.set(f"joined/{rank}", "")
    keys = [f"joined/{other}" for other in range(num_ranks)]
    if rank == 0:
        missing = [keys.index(key) for key in wait_for(store, keys, timeout_s)]
        if not missing:
            store.set("joined/all", "")
    elif wait_for(store, ["joined/all"], timeout_s):
        missing = [other for other, key in enumerate(keys) if not store.check([key])] or [0]
    else:
        missing = []
    if missing:
        ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        raise RankError(
            f"{ranks} did not join within {timeout_s:g} s ({num_ranks - len(missing)} of {num_ranks} did). See the "
            "output of that process; if it only needs more time to start, raise strategy.timeout_s."
        )


def _unknown(rank: int) -> str:
    return ""
