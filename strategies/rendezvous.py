"""Ranks meet: the store they share, who has joined, and barriers that name the rank that does not come."""

import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from torch.distributed import Store, TCPStore

POLL_S = (0.0005, 0.02)
"""Shortest and longest pause between two looks at the store; it grows while nothing happens."""


class RankError(RuntimeError):
    """Ranks can't go on together; the message names the rank at fault and where it is."""


def open_store(address: str, port: int, rank: int, timeout: timedelta) -> Store:
    """Connect to the store that all ranks share; rank 0 hosts it unless the launcher does.

    Args:
        address: host of the store.
        port: its port.
        rank: this rank.
        timeout: for connecting.

    Raises:
        RankError: the host can't be reached.
    """
    hosted_by_agent = is_hosted_by_agent()
    is_host = rank == 0 and not hosted_by_agent
    try:
        return TCPStore(address, port, None, is_host, timeout, wait_for_workers=False, multi_tenant=True)
    except Exception as exc:  # torch's DistNetworkError, DistStoreError, and plain RuntimeError
        raise RankError(
            f"rank {rank} could not reach {'the launcher' if hosted_by_agent else 'rank 0'} at {address}:{port} within "
            f"{timeout.total_seconds():g} s. Is it running, and does the network let this port through?"
        ) from exc


def is_hosted_by_agent() -> bool:
    """Whether the launcher hosts the store, which then outlives all ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class Meeting:
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


def wait_for(store: Store, keys: Iterable[str], timeout_s: float) -> list[str]:
    """Wait until keys are set, letting signals through.

    Returns:
        The keys that were not set in time.
    """
    missing = list(keys)
    deadline = time.monotonic() + timeout_s
    pause_s = POLL_S[0]
    while True:
        if store.check(missing):
            return []
        if time.monotonic() > deadline:
            return [key for key in missing if not store.check([key])]
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S[1])


def _unknown(rank: int) -> str:
    return ""
