"""What a rank knows of its peers: the store they share, where they meet, signs of life, and requests to stop."""

import os
from contextlib import suppress
from datetime import timedelta

from lightning_fabric.plugins.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from torch.distributed import PrefixStore, Store

from .rendezvous import Meeting, is_hosted_by_agent, join, open_store, wait_for
from .stopping import Stopping
from .watch import RANK_FAILED, Watch, is_about_communication

_STORES: dict[tuple[int, int], Store] = {}
"""The store of this process, by rank and number of ranks; like torch's process group, it lives as long."""

LEAVE_S = 3.0
"""Seconds that the store's host waits at its end for the others to leave."""

_num_runs = 0


class Peers:
    """The other ranks, during one run of a trainer.

    Args:
        environment: knows rank, number of ranks, and the store's address.
        timeout_s: seconds to wait for ranks that do not come.

    Attributes:
        store: shared by all ranks, for this run alone.
        meeting: where ranks wait for each other.
        stopping: when to stop together.
        watch: signs of life.
    """

    def __init__(self, environment: ClusterEnvironment, timeout_s: float) -> None:
        global _num_runs
        rank, num_ranks = environment.global_rank(), environment.world_size()
        _num_runs += 1
        self.root_store = root_store(environment, timeout_s)
        self.store = PrefixStore(f"run/{_num_runs}", self.root_store)
        join(self.store, rank, num_ranks, timeout_s)
        self.stopping = Stopping(rank, num_ranks, self.store)
        self.watch = Watch(self.store, rank, num_ranks, self.stopping)
        self.meeting = Meeting(self.store, rank, num_ranks, timeout_s, self.watch.where)
        self.watch.start()

    def end(self) -> None:
        """Stop giving signs of life."""
        self.watch.end()

    def explain(self, exc: BaseException) -> None:
        """Tell the peers of a failure; where it is only that a peer could not be reached, name that peer in it."""
        self.watch.freeze(exc)
        if not is_about_communication(exc):
            self.watch.tell(exc)
        elif culprits := self.watch.culprits():
            exc.args = (f"{culprits} This rank noticed it as: {exc}",)


def root_store(environment: ClusterEnvironment, timeout_s: float) -> Store:
    """Give the store of this attempt: after a restart nobody reads what the processes before have left."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"evener/{attempt}", base_store(environment, timeout_s))


def base_store(environment: ClusterEnvironment, timeout_s: float) -> Store:
    """Open the store of this process, once; where a launcher hosts it, it outlives restarts."""
    rank, num_ranks = environment.global_rank(), environment.world_size()
    if (rank, num_ranks) not in _STORES:
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        timeout = timedelta(seconds=timeout_s)
        _STORES[rank, num_ranks] = open_store(environment.main_address, environment.main_port, rank, timeout)
    return _STORES[rank, num_ranks]


def leave_store() -> None:
    """Leave the store that all ranks share, as the last thing of a process: the rank that hosts it goes last.

    It would take the store from ranks that still look whether all have come to their last meeting. If a rank has
    failed, or does not leave in time, it goes nevertheless.
    """
    for (rank, num_ranks), store in _STORES.items():
        if is_hosted_by_agent() or RANK_FAILED.is_set():
            continue
        keys = [_left_key(other) for other in range(1, num_ranks)]
        with suppress(RuntimeError):  # the store has gone with its host
            if rank:
                store.set(_left_key(rank), "")
            else:
                wait_for(store, keys, LEAVE_S)


def _left_key(rank: int) -> str:
    return f"left/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


KUBEFLOW = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
"""Environment variables of Kubeflow's PyTorchJob, which starts one process per pod."""


def kubeflow() -> ClusterEnvironment | None:
    """Kubeflow's environment, which Lightning does not detect; None elsewhere."""
    elsewhere = TorchElasticEnvironment.detect() or SLURMEnvironment.detect() or "LOCAL_RANK" in os.environ
    return KubeflowEnvironment() if not elsewhere and all(name in os.environ for name in KUBEFLOW) else None
