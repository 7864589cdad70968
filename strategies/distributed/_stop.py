"""All ranks stop at the same step after a signal to any of them, and ordinary steps pay one attribute for it.

    rank 0   ── step 7 ── ● armed ── step 8 ── all are armed: "stop at 10" ── step 9 ── ■ 10
    rank 1   ── step 7 ── step 8 ── ● armed ── step 9 ────────────────────────────────── ■ 10

A thread hears of the request and arms its rank. From then on the rank looks at the store between two optimizer steps.
When all ranks do, rank 0 sets the step, before it begins the one before it. No rank can be past that step unaware: to
get there it needs rank 0's gradients of a step that rank 0 begins after its announcement.
"""

import torch
from torch.distributed import Store

REQUEST, ANNOUNCEMENT = "stop/requested", "stop/step"


class StopAgreement:
    """What one rank knows of a stop.

    Args:
        rank: this rank.
        num_ranks: number of ranks.
        store: shared by all ranks; None for a single process.

    Attributes:
        armed: whether a stop was asked for, here or elsewhere. The loop reads it after every optimizer step, and
            calls `due` when it is set.
    """

    def __init__(self, rank: int = 0, num_ranks: int = 1, store: Store | None = None) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.store = store
        self.armed = False
        self.signal: int | None = None
        self._told = False
        self._takes_part = False
        self._step: int | None = None

    def request(self, signum: int) -> None:
        """Ask all ranks to stop. Safe to call from a signal handler: it only sets attributes."""
        self.signal = signum
        self.armed = True

    def listen(self, store: Store) -> None:
        """Pass a request on, and hear of others' requests; called now and then by a thread.

        Args:
            store: a connection of the thread's own.
        """
        if self.armed and not self._told and self.signal is not None:
            store.set(REQUEST, str(self.signal))
            self._told = True
        elif not self.armed and store.check([REQUEST]):
            self.signal = int(store.get(REQUEST))
            self.armed = True

    def due(self, step: int) -> bool:
        """Whether to stop now, the same answer on all ranks at the same step.

        Args:
            step: number of optimizer steps that this rank has finished.
        """
        if self.store is None:
            return True
        if not self._takes_part:
            self._takes_part = True
            self.store.set(f"stop/armed/{self.rank}", "")
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the gradients of the last step have come: no step is begun ahead of them
        if self.rank == 0 and self._step is None and self._all_armed(self.store):
            self.store.set(ANNOUNCEMENT, str(step + 1))
        if self._step is None and self.store.check([ANNOUNCEMENT]):
            self._step = int(self.store.get(ANNOUNCEMENT))
        return self._step is not None and step >= self._step

    def _all_armed(self, store: Store) -> bool:
        return store.check([f"stop/armed/{rank}" for rank in range(self.num_ranks)])
