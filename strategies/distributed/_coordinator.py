"""Coordinate the ranks of one run: their store, barriers, heartbeats and requests to stop."""

from lightning_fabric.plugins.environments import ClusterEnvironment
from torch.distributed import PrefixStore

from ._barrier import Meeting, join
from ._heartbeat import Watch, is_about_communication
from ._stop import Stopping
from .store import root_store

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
