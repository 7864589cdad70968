"""Stop all ranks at the same step after a signal to any of them; other steps only read one attribute.

    rank 0   ── step 7 ── ● armed ── step 8 ── all are armed: "stop at 10" ── step 9 ── ■ 10
    rank 1   ── step 7 ── step 8 ── ● armed ── step 9 ────────────────────────────────── ■ 10

A thread receives the request and arms its rank. From then on the rank checks the store between optimizer steps. When
all ranks are armed, rank 0 announces the step to stop at, before it starts the step before that one. No rank can pass
it unaware: it would need rank 0's gradients of a step that rank 0 starts after the announcement.
"""

from collections.abc import Iterable

import torch
from torch.distributed import Store

from ..core.devices import is_accelerator

REQUEST, ANNOUNCEMENT = "stop/requested", "stop/step"


class StopAgreement:
    """Agrees with the other ranks on the step to stop at.

    Args:
        rank: this rank.
        num_ranks: number of ranks.
        store: shared by all ranks; None for a single process.

    Attributes:
        armed: whether any rank was asked to stop. The loop reads it after every optimizer step, and
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
        """Publish this rank's request and read those of others; called regularly by a thread.

        Args:
            store: the thread's own connection.
        """
        if self.armed and not self._told and self.signal is not None:
            store.set(REQUEST, str(self.signal))
            self._told = True
        elif not self.armed and store.check([REQUEST]):
            self.signal = int(store.get(REQUEST))
            self.armed = True

    def due(self, step: int, devices: Iterable[torch.device] = ()) -> bool:
        """Whether to stop now; the answer is the same on all ranks at the same step.

        Args:
            step: number of optimizer steps that this rank has finished.
            devices: devices of this process. They are synchronized first, so that the last step's gradients have
                arrived before the rank counts as armed: a host may run several steps ahead of its device.
        """
        if self.store is None:
            return True
        for device in filter(is_accelerator, devices):
            torch.accelerator.synchronize(device)
        if not self._takes_part:
            self._takes_part = True
            self.store.set(f"stop/armed/{self.rank}", "")
        if self.rank == 0 and self._step is None and self._all_armed(self.store):
            self.store.set(ANNOUNCEMENT, str(step + 1))
        if self._step is None and self.store.check([ANNOUNCEMENT]):
            self._step = int(self.store.get(ANNOUNCEMENT))
        return self._step is not None and step >= self._step

    def _all_armed(self, store: Store) -> bool:
        return store.check([f"stop/armed/{rank}" for rank in range(self.num_ranks)])
