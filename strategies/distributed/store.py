"""Find the other ranks: the environment in which they were started, and the key-value store that all share."""

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

from lightning_fabric.plugins.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from torch.distributed import PrefixStore, Store, TCPStore

from ..core.errors import ConfigError

RANK_FAILED = threading.Event()
"""Set in every rank once any of them has failed or gone: nobody is left to agree with on when to stop."""

PEER_LOST = threading.Event()
"""Set in the other ranks once one has died without which they can go on; every wait for it ends."""

_KUBEFLOW = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")  # which its PyTorchJob sets in each pod, for a process
_BATCH_STEP = str(0xFFFFFFFB)  # SLURM's name of the step of a batch script itself
LOOPBACK, _LOOPBACK_DEVICE = "127.0.0.1", "lo"
LEAVE_S = 3.0  # that the store's host waits at exit for the others to leave
POLL_S = (0.0005, 0.02)  # shortest and longest pause between two looks at the store; it grows while nothing changes


class RankError(RuntimeError):
    """Raised when ranks can't continue together; the message names the rank at fault and where it is."""


def kubeflow() -> ClusterEnvironment | None:
    """Return Kubeflow's environment, which Lightning does not detect; None elsewhere."""
    elsewhere = TorchElasticEnvironment.detect() or SLURMEnvironment.detect() or "LOCAL_RANK" in os.environ
    return KubeflowEnvironment() if not elsewhere and all(name in os.environ for name in _KUBEFLOW) else None


def num_processes(num_devices: int, devices_per_process: int) -> int:
    """Count the processes of one node: its devices, in order, must divide into blocks of equal size."""
    if num_devices < 1 or num_devices % devices_per_process:
        raise ConfigError(
            f"{num_devices} devices don't divide into processes of {devices_per_process} devices. "
            f"Give a multiple of {devices_per_process} devices, or another number of devices per process."
        )
    return num_devices // devices_per_process


def verify_started(environment: ClusterEnvironment) -> None:
    """Refuse to wait for ranks that nobody has started, as variables left in a shell or a job would have it."""
    steps = {os.environ.get(name, "") for name in ("SLURM_STEP_ID", "SLURM_STEPID")}
    by_hand = isinstance(environment, LightningEnvironment) and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    in_job = isinstance(environment, SLURMEnvironment) and steps <= {"", _BATCH_STEP}
    if environment.world_size() > 1 and (in_job or (by_hand and "LOCAL_RANK" in os.environ)):
        name, start = ("SLURM_NTASKS", "srun") if in_job else ("LOCAL_RANK", "torchrun")
        raise ConfigError(
            f"{name}={os.environ[name]} is set, so this process is taken for one of {environment.world_size()}, but "
            f"nobody has started the others. Start it with {start}; to run on this machine alone, unset {name}."
        )


@dataclass
class _OwnStore:
    """The store of this process, and the seconds within which its host must answer."""

    store: Any
    rank: int
    num_ranks: int
    place: tuple[str, int]
    deadline_s: float = math.inf


_own: _OwnStore | None = None


def is_hosted_by_agent() -> bool:
    """Whether the launcher hosts the store, so that it outlives all ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt() -> str:
    """The number of this attempt in a store that outlives it: torch's agents count restarts each for itself."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_hosted_by_agent() else "0"


def root_store(environment: ClusterEnvironment, timeout_s: float) -> Store:
    """Return the store of this attempt; after a restart no rank reads entries of earlier processes."""
    return PrefixStore(f"evener/{attempt()}", base_store(environment, timeout_s))


def base_store(environment: ClusterEnvironment, timeout_s: float) -> Store:
    """Open the store of this process, once; rank 0 hosts it, unless the launcher does so that it outlives restarts."""
    global _own
    if _own is None:
        verify_started(environment)
        rank, (host, port) = environment.global_rank(), (environment.main_address, environment.main_port)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
        by_agent, limit = is_hosted_by_agent(), timedelta(seconds=timeout_s)
        try:
            is_host = not (rank or by_agent)
            store = TCPStore(host, port, None, is_host, limit, wait_for_workers=False, multi_tenant=True)
        except Exception as exc:  # torch's DistNetworkError, DistStoreError, and plain RuntimeError
            raise RankError(
                f"rank {rank} could not reach {'the launcher' if by_agent else 'rank 0'} at {host}:{port} within "
                f"{timeout_s:g} s. Check that it is running and that the network allows this port."
            ) from exc
        _own = _OwnStore(store, rank, environment.world_size(), (host, port))
    if timeout_s < _own.deadline_s:
        _own.deadline_s = timeout_s
        _bound_reads(_own)
    return _own.store


def _bound_reads(own: _OwnStore) -> None:
    """Have reads fail that a frozen host does not answer in time; torch's client waits without end, in native code."""
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
    return (
        f"The store at {_own.place[0]}:{_own.place[1]} has not answered for {_own.deadline_s:g} s: the process that "
        f"hosts it ({'the launcher' if is_hosted_by_agent() else 'rank 0'}) is frozen, or the network is cut."
    )


@contextmanager
def hosted_store() -> Generator[dict[str, str]]:
    """Host a store for ranks of this machine inside the block; yield the environment variables that lead them to it."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        port: int = listening.getsockname()[1]
        descriptor = listening.detach()
    store = TCPStore(LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=descriptor)
    places = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if os.path.exists(f"/sys/class/net/{_LOOPBACK_DEVICE}"):
        places["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", _LOOPBACK_DEVICE)
    yield places


def leave_store() -> None:
    """Leave the shared store as a process's last action; rank 0, where it hosts it, waits a little for the others."""
    if _own is None or is_hosted_by_agent() or RANK_FAILED.is_set():
        return
    keys = [f"left/{attempt()}/{other}" for other in range(_own.num_ranks)]
    with suppress(RuntimeError):  # the store ended with its host
        if _own.rank:
            _own.store.set(keys[_own.rank], "")
        else:
            wait_for(_own.store, keys[1:], LEAVE_S)


def wait_for(store: Store, keys: Iterable[str], timeout_s: float, meanwhile: Callable[[], None] | None = None) -> bool:
    """Wait until keys are set, and return whether they were in time; `meanwhile` is called before each look."""
    expected = list(keys)

    def are_set() -> bool:
        if meanwhile is not None:
            meanwhile()
        return store.check(expected)

    try:
        return poll(are_set, timeout_s)
    except RuntimeError as exc:
        if said := silence(exc):
            raise RankError(said) from exc
        raise


def meet(
    store: Store, place: str, rank: int, num_ranks: int, value: str, timeout_s: float,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[list[str], list[int]]:  # fmt: skip
    """Give a value at a place and wait for those of all ranks, which rank 0 collects; return them, and who is late."""
    keys, answer = [f"{place}/{other}" for other in range(num_ranks)], f"{place}/all"
    store.set(keys[rank], value)
    if not wait_for(store, [answer] if rank else keys, timeout_s, meanwhile):
        return [], [other for other, key in enumerate(keys) if not store.check([key])] or [0]
    if rank:
        told: list[str] = json.loads(store.get(answer))
        return told if len(told) > 1 else told * num_ranks, []
    values = [found.decode() for found in store.multi_get(keys)]
    store.set(answer, json.dumps(values if len(set(values)) > 1 else values[:1]))
    return values, []


def poll(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Ask again and again whether something is done, and return whether it was in time."""
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
