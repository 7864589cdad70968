"""Open, wait on, watch and leave the key-value store that all ranks share."""

import json
import math
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning_fabric.plugins.environments import ClusterEnvironment
from torch.distributed import PrefixStore, Store, TCPStore

from .environment import verify_started

RANK_FAILED = threading.Event()
"""Set in every rank once any of them has failed or gone: nobody is left to agree with on when to stop."""

PEER_LOST = threading.Event()
"""Set in the other ranks once one has died without which they can go on; every wait for it ends."""

LOOPBACK, _LOOPBACK_DEVICE = "127.0.0.1", "lo"

LEAVE_S = 3.0
"""Seconds that the store's host waits at exit for the others to leave."""


@dataclass
class _OwnStore:
    """The store of this process, and the seconds within which its host must answer."""

    store: Any
    rank: int
    num_ranks: int
    place: tuple[str, int]
    deadline_s: float = math.inf


_own: _OwnStore | None = None


def root_store(environment: ClusterEnvironment, timeout_s: float) -> Store:
    """Return the store of this attempt; after a restart no rank reads entries of earlier processes."""
    return PrefixStore(f"evener/{attempt()}", base_store(environment, timeout_s))


def attempt() -> str:
    """The number of this attempt in a store that outlives it.

    torch's agents count restarts each for itself: one that has joined later has a smaller number.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_hosted_by_agent() else "0"


def base_store(environment: ClusterEnvironment, timeout_s: float) -> Store:
    """Open the store of this process, once; if a launcher hosts it, it outlives restarts."""
    global _own
    if _own is None:
        verify_started(environment)
        rank, place = environment.global_rank(), (environment.main_address, environment.main_port)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place[0], str(place[1])
        _own = _OwnStore(_open_store(*place, rank, timeout_s), rank, environment.world_size(), place)
    if timeout_s < _own.deadline_s:
        _own.deadline_s = timeout_s
        _bound_reads(_own)
    return _own.store


def _bound_reads(own: _OwnStore) -> None:
    """Have reads fail that the store's host does not answer in time.

    A host that is killed closes its connections, and whoever reads from it fails at once. One that is frozen (a stopped
    process, a suspended machine, a network that is cut) answers nothing, and torch's client waits without end, in
    native code, where no handler of a signal runs.
    """
    limit = struct.pack("ll", int(own.deadline_s), int(own.deadline_s % 1 * 1e6))
    peers = {info[4][:2] for info in socket.getaddrinfo(*own.place)}
    for _, peer, connection in connections():
        if peer in peers:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def another_connection(store: Any) -> Any:
    """Connect to a store once more: on one connection requests wait for each other."""
    again = store.clone()
    if _own is not None:
        _bound_reads(_own)
    return again


def silence(exc: BaseException) -> str:
    """Say that the store's host does not answer, if that is what an error of its reader says."""
    if _own is None or "Socket Timeout" not in str(exc):
        return ""
    host = "the launcher" if is_hosted_by_agent() else "rank 0"
    return (
        f"The store at {_own.place[0]}:{_own.place[1]} has not answered for {_own.deadline_s:g} s: the process that "
        f"hosts it ({host}) is frozen, or the network is cut."
    )


@contextmanager
def hosted_store() -> Generator[dict[str, str]]:
    """Host a store for ranks that all run on this machine inside the block; no other machine can reach it.

    Yields:
        Environment variables that lead the ranks to it, and keep gloo's connections within this machine unless the user
        has chosen a device.
    """
    with socket.create_server((LOOPBACK, 0)) as listening:
        port: int = listening.getsockname()[1]
        descriptor = listening.detach()
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
    if _own is None or is_hosted_by_agent() or RANK_FAILED.is_set():
        return
    keys = [f"left/{attempt()}/{other}" for other in range(_own.num_ranks)]
    with suppress(RuntimeError):  # the store ended with its host
        if _own.rank:
            _own.store.set(keys[_own.rank], "")
        else:
            wait_for(_own.store, keys[1:], LEAVE_S)


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
        if said := silence(exc):
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


def connections() -> Iterator[tuple[int, tuple[str, int], socket.socket]]:
    """This process's internet connections: the kernel's number, of which none is used again, the peer, and a copy."""
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # closed meanwhile, or it has no peer
            if stat.S_ISSOCK((about := os.fstat(descriptor)).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        host, port = copy.getpeername()[:2]
                        yield about.st_ino, (host.removeprefix("::ffff:"), port), copy
