"""Coordinate the ranks of one run: their store, barriers, heartbeats and requests to stop."""

from lightning_fabric.plugins.environments import ClusterEnvironment
from torch.distributed import PrefixStore

from ._barrier import Barrier, join
from ._heartbeat import HeartbeatMonitor, is_about_communication
from ._stop import StopAgreement
from .store import root_store

_num_runs = 0


class RankCoordinator:
    """The other ranks, during one run of a trainer.

    Args:
        environment: knows rank, number of ranks, and the store's address.
        timeout_s: seconds to wait for ranks that do not come.

    Attributes:
        store: shared by all ranks, for this run alone.
        barrier: where ranks wait for each other.
        stop_agreement: when to stop together.
        heartbeat: signs of life.
    """

    def __init__(self, environment: ClusterEnvironment, timeout_s: float) -> None:
        global _num_runs
        rank, num_ranks = environment.global_rank(), environment.world_size()
        _num_runs += 1
        self.root_store = root_store(environment, timeout_s)
        self.store = PrefixStore(f"run/{_num_runs}", self.root_store)
        join(self.store, rank, num_ranks, timeout_s)
        self.stop_agreement = StopAgreement(rank, num_ranks, self.store)
        self.heartbeat = HeartbeatMonitor(self.store, rank, num_ranks, self.stop_agreement)
        self.barrier = Barrier(self.store, rank, num_ranks, timeout_s, self.heartbeat.where)
        self.heartbeat.start()

    def end(self) -> None:
        """Stop giving signs of life."""
        self.heartbeat.end()

    def explain(self, exc: BaseException) -> None:
        """Tell the peers of a failure; where it is only that a peer could not be reached, name that peer in it."""
        self.heartbeat.freeze(exc)
        if not is_about_communication(exc):
            self.heartbeat.tell(exc)
        elif culprits := self.heartbeat.culprits():
            exc.args = (f"{culprits} This rank noticed it as: {exc}",)
