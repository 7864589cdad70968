"""Barriers that name the rank that does not arrive."""

from collections.abc import Callable

from torch.distributed import Store

from .store import RankError, wait_for


class Barrier:
    """Where ranks wait for each other, by the name of the place.

    Args:
        store: shared by all ranks.
        rank: this rank.
        num_ranks: number of ranks.
        timeout_s: seconds to wait for the others.
        describe: says where a rank is that did not come.
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
        """Wait until all ranks are at this place.

        Raises:
            RankError: a rank did not come in time, or is at another place; the message names it.
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
            where = ", ".join(f"rank {rank} at {places[rank]!r}" for rank in strangers)
            raise RankError(
                f"rank {self.rank} waits at {place!r} and {where}. All ranks must do the same in one order."
            )
        if self._count > 2:  # whoever is here has left the meeting before the last
            self.store.delete_key(self._key(self._count - 2, self.rank))

    def _key(self, count: int, rank: int) -> str:
        return f"meeting/{count}/{rank}"

    def _absence(self, place: str, missing: list[int]) -> str:
        where = "; ".join(f"rank {rank} did not come{self.describe(rank)}" for rank in missing)
        return (
            f"rank {self.rank} waited {self.timeout_s:g} s at {place!r}: {where}. What all ranks must do together "
            "(saving a checkpoint, an epoch's end) can't be done by some of them only."
        )


def join(store: Store, rank: int, num_ranks: int, timeout_s: float) -> None:
    """Wait until all ranks have joined.

    Raises:
        RankError: some have not in time; the message names them.
    """
    store.set(f"joined/{rank}", "")
    keys = [f"joined/{other}" for other in range(num_ranks)]
    missing = [keys.index(key) for key in wait_for(store, keys, timeout_s)]
    if missing:
        ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        raise RankError(
            f"{ranks} did not join within {timeout_s:g} s ({num_ranks - len(missing)} of {num_ranks} did). See the "
            "output of that process; if it only needs longer to start, raise strategy.timeout_s."
        )


def _unknown(rank: int) -> str:
    return ""
