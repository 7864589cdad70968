"""Coordinate the ranks of one run: their store, barriers, heartbeats and requests to stop."""

from lightning_fabric.plugins.environments import ClusterEnvironment
from torch.distributed import PrefixStore

from ._barrier import Barrier
from ._heartbeat import HeartbeatMonitor, is_about_communication
from ._stop import StopAgreement
from .signed_store import signed
from .store import root_store

_num_runs = 0


class RankCoordinator:
    """Connects this rank to the others during one run of a trainer.

    Args:
        environment: provides the rank, the number of ranks, and the store's address.
        timeout_s: seconds to wait for other ranks.
        num_nodes: machines, where the caller knows.

    Attributes:
        store: store of this run, shared by all ranks.
        barrier: makes ranks wait for each other.
        stop_agreement: decides when all ranks stop.
        heartbeat: monitors heartbeats.
    """

    def __init__(self, environment: ClusterEnvironment, timeout_s: float, num_nodes: int | None = None) -> None:
        global _num_runs
        rank, num_ranks = environment.global_rank(), environment.world_size()
        _num_runs += 1
        self.root_store = root_store(environment, timeout_s, num_nodes)
        self.store = signed(PrefixStore(f"run/{_num_runs}", self.root_store), f"run/{_num_runs}")
        self.barrier = Barrier(self.store, rank, num_ranks, timeout_s, lambda other: self.heartbeat.where(other))
        self.barrier.join()
        self.stop_agreement = StopAgreement(rank, num_ranks, self.store)
        self.heartbeat = HeartbeatMonitor(self.store, rank, num_ranks, self.stop_agreement, timeout_s)
        self.heartbeat.start()

    def end(self) -> None:
        """Stop the heartbeat."""
        self.heartbeat.end()

    def explain(self, exc: BaseException) -> None:
        """Report a failure to the other ranks; if a peer could not be reached, name that peer in the error instead."""
        self.heartbeat.freeze(exc)
        if not is_about_communication(exc):
            self.heartbeat.tell(exc)
        elif culprits := self.heartbeat.culprits():
            exc.args = (f"{culprits} The error on this rank was: {exc}",)
