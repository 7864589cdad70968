"""Open, wait on, watch and leave the key-value store that all ranks share."""

import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from lightning_fabric.plugins.environments import ClusterEnvironment
from torch.distributed import PrefixStore, Store, TCPStore

from ..core.errors import ConfigError
from .environment import verify_started
from .signed_store import SECRET, announce

logger = logging.getLogger(__name__)

RANK_FAILED = threading.Event()
"""Set in every rank once any of them has failed or gone: nobody is left to agree with on when to stop."""

PEER_LOST = threading.Event()
"""Set in the other ranks once one has died without which they can go on; every wait for it ends."""

PING_S = 0.5
"""Seconds between two questions."""

_STORES: dict[tuple[int, int], tuple[Store, "StoreWatch"]] = {}
"""The store of this process, and what holds it to a deadline, by rank and number of ranks; it lasts as long."""

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
        _STORES[rank, num_ranks] = store, StoreWatch(store.clone(), *place, timeout_s)
    store, watch = _STORES[rank, num_ranks]
    watch.deadline_s = min(watch.deadline_s, timeout_s)
    return store


def another_connection(environment: ClusterEnvironment) -> Store:
    """Connect to the store of this attempt once more."""
    store: Any = _STORES[environment.global_rank(), environment.world_size()][0]
    return PrefixStore(f"evener/{attempt()}", store.clone())


def keep_store(before: tuple[int, int], now: tuple[int, int]) -> None:
    """Use the store of this process on, which has another rank among another number of ranks."""
    if before in _STORES:
        _STORES[now] = _STORES.pop(before)


def forget_stores() -> None:
    """Have no store, in a forked process; the connections are the other one's."""
    _STORES.clear()


def silence() -> str:
    """Say which store was given up because its host does not answer; empty if none was."""
    for _, watch in _STORES.values():
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
    for (rank, num_ranks), (store, watch) in _STORES.items():
        watch.end()
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


class StoreWatch:
    """Watches one store on a connection of its own, and shuts all (`silent`) once it has not answered in time.

    A host that is killed closes its connections, and whoever reads from it fails at once. One that is frozen (a stopped
    process, a suspended machine, a network that is cut) answers nothing, and torch's client waits without end, in
    native code, where no handler of a signal runs. So a thread asks the store for something, and another counts the
    seconds without an answer, and shuts the connections when there are too many: then every read fails.
    """

    def __init__(self, store: Store, address: str, port: int, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.silent = False
        self.place = f"{address}:{port}"
        self._peer = (address, port)
        self._num_answers = 0
        self._ended = threading.Event()
        asks = threading.Thread(target=self._ask, args=(store,), name="evener-store", daemon=True)
        self._threads = asks, threading.Thread(target=self._count, name="evener-store-watch", daemon=True)
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End the threads, unless one waits for an answer."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=0.2)

    def _ask(self, store: Store) -> None:
        with suppress(RuntimeError):  # the host has gone: whoever reads fails by itself
            while not self._ended.wait(PING_S):
                store.check(["answer"])
                self._num_answers += 1
        self._ended.set()

    def _count(self) -> None:
        peers = {info[4][:2] for info in socket.getaddrinfo(*self._peer)}
        # seconds are counted, not read from a clock: this process may have been frozen itself
        before, num_missed = 0, 0
        while not self._ended.wait(PING_S):
            num_missed = num_missed + 1 if self._num_answers == before else 0
            before = self._num_answers
            if num_missed * PING_S > self.deadline_s:
                self.silent = True
                RANK_FAILED.set()
                cut_connections(lambda _, host, port: (host, port) in peers)
                return


def sockets() -> Iterator[tuple[int, socket.socket]]:
    """This process's internet sockets: the kernel's number of each, of which none is used again, and a copy."""
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK((about := os.fstat(descriptor)).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        yield about.st_ino, copy


def cut_connections(is_cut: Callable[[int, str, int], bool]) -> None:
    """Shut those of this process's connections of which, by number, host and port of the peer, a function says so."""
    for number, copy in sockets():
        with suppress(OSError):  # gloo ends the process where a socket that listens is shut: it has no peer
            host, port = copy.getpeername()[:2]
            if is_cut(number, host.removeprefix("::ffff:"), port):
                copy.shutdown(socket.SHUT_RDWR)
