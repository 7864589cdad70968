"""Wait for all ranks, and name those that do not arrive."""

from collections.abc import Callable

from torch.distributed import Store

from .store import RankError, wait_for


class Barrier:
    """Makes ranks wait for each other at named places.

    Args:
        store: shared by all ranks.
        rank: this rank.
        num_ranks: number of ranks.
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
        keys = [self._key(self._count, rank) for rank in range(self.num_ranks)]
        self.store.set(keys[self.rank], place)
        missing = wait_for(self.store, keys, self.timeout_s)
        if missing:
            raise RankError(self._absence(place, [keys.index(key) for key in missing]))
        places = [self.store.get(key).decode() for key in keys]
        strangers = [rank for rank, other in enumerate(places) if other != place]
        if strangers:
            where = ", ".join(f"rank {rank} is at {places[rank]!r}" for rank in strangers)
            raise RankError(
                f"rank {self.rank} waits at {place!r}, but {where}. All ranks must reach the same places in the same "
                "order."
            )
        if self._count > 2:  # all ranks that are here have left the barrier before the last
            self.store.delete_key(self._key(self._count - 2, self.rank))

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
    missing = [keys.index(key) for key in wait_for(store, keys, timeout_s)]
    if missing:
        ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        raise RankError(
            f"{ranks} did not join within {timeout_s:g} s ({num_ranks - len(missing)} of {num_ranks} did). See the "
            "output of that process; if it only needs more time to start, raise strategy.timeout_s."
        )


def _unknown(rank: int) -> str:
    return ""
