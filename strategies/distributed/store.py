"""Open, wait on and leave the key-value store that all ranks share."""

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from lightning_fabric.plugins.environments import ClusterEnvironment
from torch.distributed import PrefixStore, Store, TCPStore

from ..core.errors import ConfigError
from ._store_watch import PEER_LOST, RANK_FAILED, StoreWatch
from .environment import verify_started
from .signed_store import SECRET, announce

logger = logging.getLogger(__name__)

_STORES: dict[tuple[int, int], Store] = {}
"""The store of this process, by rank and number of ranks; like torch's process group, it lasts as long."""

_WATCHES: dict[tuple[int, int], StoreWatch] = {}
"""What holds each of them to a deadline."""

LOOPBACK, _LOOPBACK_DEVICE = "127.0.0.1", "lo"

_REACH_S = 5.0
LEAVE_S = 3.0
"""Seconds that the store's host waits at exit for the others to leave."""


def root_store(environment: ClusterEnvironment, timeout_s: float, num_nodes: int | None = None) -> Store:
    """Return the store of this attempt; after a restart no rank reads entries of earlier processes."""
    return PrefixStore(f"evener/{attempt()}", base_store(environment, timeout_s, num_nodes))


def attempt() -> str:
    """The number of this attempt in a store that outlives it.

    torch's agents count restarts each for itself: one that has joined later has a smaller number.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_hosted_by_agent() else "0"


def base_store(environment: ClusterEnvironment, timeout_s: float, num_nodes: int | None = None) -> Store:
    """Open the store of this process, once; if a launcher hosts it, it outlives restarts."""
    rank, num_ranks = environment.global_rank(), environment.world_size()
    if (rank, num_ranks) not in _STORES:
        verify_started(environment, num_nodes)
        if rank == 0 and (num_nodes or 1) > 1 and not os.environ.get(SECRET):
            logger.warning(
                "The store at %s:%s takes anybody who reaches it for a rank. Set %s to the same random text on all "
                "machines, and let the network keep others out (docs/ddp.md).",
                environment.main_address, environment.main_port, SECRET,
            )  # fmt: skip
        place = (environment.main_address, environment.main_port)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place[0], str(place[1])
        store: Any = _open_store(*place, rank, timeout_s)
        announce(PrefixStore(f"evener/{attempt()}", store), rank)
        watch = StoreWatch(store.clone(), *place, timeout_s)
        watch.start()
        _STORES[rank, num_ranks], _WATCHES[rank, num_ranks] = store, watch
    if (watch := _WATCHES.get((rank, num_ranks))) is not None:
        watch.deadline_s = min(watch.deadline_s, timeout_s)
    return _STORES[rank, num_ranks]


def another_connection(environment: ClusterEnvironment) -> Store:
    """Connect to the store of this attempt once more."""
    store: Any = _STORES[environment.global_rank(), environment.world_size()]
    return PrefixStore(f"evener/{attempt()}", store.clone())


def keep_store(before: tuple[int, int], now: tuple[int, int]) -> None:
    """Use the store of this process on, which has another rank among another number of ranks."""
    if before in _STORES:
        _STORES[now], _WATCHES[now] = _STORES.pop(before), _WATCHES.pop(before)


def forget_stores() -> None:
    """Have no store, in a forked process; the connections are the other one's."""
    _STORES.clear()
    _WATCHES.clear()


def silence() -> str:
    """Say which store was given up because its host does not answer; empty if none was."""
    for watch in _WATCHES.values():
        if watch.silent:
            return (
                f"The store at {watch.place} has not answered for {watch.deadline_s:g} s: the process that hosts it "
                f"({'the launcher' if is_hosted_by_agent() else 'rank 0'}) is frozen, or the network is cut."
            )
    return ""


@contextmanager
def hosted_store() -> Generator[dict[str, str]]:
    """Host a store for ranks that all run on this machine inside the block; no other machine can reach it.

    Yields:
        Environment variables that lead the ranks to it, and keep gloo's connections within this machine unless the user
        has chosen a device.

    Raises:
        ConfigError: this machine has no loopback, on which torch would look for it for minutes.
    """
    try:
        with socket.create_server((LOOPBACK, 0)) as listening:
            socket.create_connection(listening.getsockname(), timeout=_REACH_S).close()
            listening.accept()[0].close()
            port: int = listening.getsockname()[1]
            descriptor = listening.detach()
    except OSError as exc:
        raise ConfigError(
            f"Ranks of one machine meet at {LOOPBACK}, which does not answer here ({exc.strerror or exc}). Bring the "
            f"loopback device up (ip link set {_LOOPBACK_DEVICE} up), or use a strategy of one process."
        ) from exc
    store = TCPStore(LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=descriptor)
    places = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if os.path.exists(f"/sys/class/net/{_LOOPBACK_DEVICE}"):
        places["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", _LOOPBACK_DEVICE)
    yield places


def leave_store() -> None:
    """Leave the shared store as the last action of a process; the rank that hosts it leaves last.

    Otherwise ranks that still wait at the last barrier would lose the store. The host leaves anyway if a rank has
    failed or does not leave in time.
    """
    for watch in _WATCHES.values():
        watch.end()
    for (rank, num_ranks), store in _STORES.items():
        if is_hosted_by_agent() or RANK_FAILED.is_set():
            continue
        keys = [f"left/{attempt()}/{other}" for other in range(num_ranks)]
        with suppress(RuntimeError):  # the store ended with its host
            if rank:
                store.set(keys[rank], "")
            else:
                wait_for(store, keys[1:], LEAVE_S)


POLL_S = (0.0005, 0.02)
"""Shortest and longest pause in seconds between two polls of the store; it grows while nothing changes."""


class RankError(RuntimeError):
    """Raised when ranks can't continue together; the message names the rank at fault and where it is."""


def _open_store(address: str, port: int, rank: int, timeout_s: float) -> Store:
    """Connect to the store that all ranks share; rank 0 hosts it unless the launcher does."""
    by_agent = is_hosted_by_agent()
    limit = timedelta(seconds=timeout_s)
    try:
        return TCPStore(address, port, None, not (rank or by_agent), limit, wait_for_workers=False, multi_tenant=True)
    except Exception as exc:  # torch's DistNetworkError, DistStoreError, and plain RuntimeError
        raise RankError(
            f"rank {rank} could not reach {'the launcher' if by_agent else 'rank 0'} at {address}:{port} within "
            f"{timeout_s:g} s. Check that it is running and that the network allows this port."
        ) from exc


def is_hosted_by_agent() -> bool:
    """Whether the launcher hosts the store, so that it outlives all ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def wait_for(
    store: Store, keys: Iterable[str], timeout_s: float, meanwhile: Callable[[], None] = lambda: None
) -> list[str]:
    """Wait until keys are set; signals are handled meanwhile.

    Args:
        meanwhile: called before each look; what it raises ends the wait.

    Returns:
        The keys that were not set in time.

    Raises:
        RankError: the store does not answer.
    """
    missing = list(keys)

    def are_set() -> bool:
        meanwhile()
        return store.check(missing)

    try:
        if poll(are_set, timeout_s):
            return []
        return [key for key in missing if not store.check([key])]
    except RuntimeError as exc:
        if said := silence():
            raise RankError(said) from exc
        raise


def meet(
    store: Store,
    place: str,
    rank: int,
    num_ranks: int,
    value: str,
    timeout_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[list[str], list[int]]:
    """Give a value at a place, a key of the store, and wait for those of all ranks; rank 0 collects them for all.

    Returns:
        The values, in order of rank, and the ranks that did not come in time, without which there are no values.
    """
    keys, answer = [f"{place}/{other}" for other in range(num_ranks)], f"{place}/all"
    store.set(keys[rank], value)
    if wait_for(store, [answer] if rank else keys, timeout_s, meanwhile):
        return [], [other for other, key in enumerate(keys) if not store.check([key])] or [0]
    if rank:
        told: list[str] = json.loads(store.get(answer))
        return told if len(told) > 1 else told * num_ranks, []
    values = [found.decode() for found in store.multi_get(keys)]
    store.set(answer, json.dumps(values if len(set(values)) > 1 else values[:1]))
    return values, []


def poll(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Ask again and again whether something is done; signals are handled meanwhile.

    Returns:
        Whether it was done in time.
    """
    deadline, pause_s = time.monotonic() + timeout_s, POLL_S[0]
    while not is_done():
        if PEER_LOST.is_set():
            raise RankError("a rank has died")
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S[1])
    return True
