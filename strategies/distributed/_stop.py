"""Stop all ranks at the same step after a signal to any of them; other steps only read one attribute.

    rank 0   ── step 7 ── ● armed ── step 8 ── all are armed: "stop at 10" ── step 9 ── ■ 10
    rank 1   ── step 7 ── step 8 ── ● armed ── step 9 ────────────────────────────────── ■ 10

A thread receives the request and arms its rank, which from then on checks the store between optimizer steps. When all
ranks are armed, rank 0 announces the step to stop at, before it starts the step before that one. No rank can pass it
unaware: it would need rank 0's gradients of a step that rank 0 starts after the announcement.

A validation is such a stretch of steps too, its batches. Ranks may have unequal numbers of them and nothing in common
until all are through, so each rank then says whether it has stopped or ended, and one that stopped stops all.

Ranks vote to end where `trainer.should_stop` is set, which each may find by itself. If it is set on all at one place,
they end there, as on one device. If some go on, all end later, at a step that rank 0 announces as after a signal.
"""

import signal
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch.distributed import Store

from ..core.devices import is_accelerator
from .objects import gather_objects
from .store import RankError, meet, poll

REQUEST = "stop/requested"
TRAINING = "training"
"""The stretch of all optimizer steps."""


class StopAgreement:
    """Agrees with the other ranks on the step to stop at.

    Args:
        store: shared by all ranks.
        timeout_s: seconds to wait for ranks that have not come to a place.
        devices: devices of this process. They are synchronized before it counts as armed, so that the last step's
            gradients have arrived: a host may run several steps ahead of its device.

    Attributes:
        armed: whether any rank was asked to stop. The loop reads it after every optimizer step, and
            calls `agreed` when it is set.
        stopped_by: the signal by which all ranks have agreed to stop, if any.
        num_passed: places that this rank has passed, of those at which a loop could end.
    """

    def __init__(
        self, rank: int, num_ranks: int, store: Store, timeout_s: float = 1800.0, devices: Sequence[torch.device] = ()
    ) -> None:
        self.rank, self.num_ranks, self.store, self.timeout_s = rank, num_ranks, store, timeout_s
        self._devices = [device for device in devices if is_accelerator(device)]
        self.armed = self._told = False
        self.signal: int | None = None
        self.stopped_by: int | None = None
        self._stops_at: dict[str, int | None] = {}
        self.num_passed = self._num_votes = 0
        self._vote = "ending/0"
        self._ends_later = ""  # the vote on which ranks have disagreed

    def request(self, signum: int) -> None:
        """Ask all ranks to stop. Safe to call from a signal handler: it only sets attributes."""
        self.signal = signum
        self.armed = True

    def listen(self, store: Store) -> None:
        """Publish this rank's request and read those of others; called regularly by a thread."""
        if not self.armed:
            if store.check([REQUEST]):
                self.request(int(store.get(REQUEST)))
        elif not self._told and self.signal is not None:
            store.set(REQUEST, str(self.signal))
            self._told = True
        vote, passed = self._vote, self.num_passed
        if store.check([vote]):  # ranks wait for this one's answer
            store.set(f"{vote}/passed/{self.rank}", str(passed))
            if store.check([f"{vote}/later"]):
                self._ends_later = vote

    @property
    def is_ending(self) -> bool:
        """Whether a rank has wished to end training where others went on, so that all end soon."""
        return self._ends_later == self._vote

    def ends(self, wished: bool, step: int, at_once: bool = False) -> bool:
        """Whether training ends here; the answer is the same on all ranks at the same place.

        Args:
            wished: this rank's loop would end (`trainer.should_stop`).
            step: as in `due`.
            at_once: ranks may wait for each other here, so that all end if one is to; else all do if all are to.
        """
        if at_once:
            ends = any(gather_objects(wished or self.is_ending))
        else:
            ends = wished and not self.is_ending and self._is_carried()
            if wished and not (ends or self.is_ending):
                self.store.set(f"{self._vote}/later", "")
                self._ends_later = self._vote
        self.num_passed += 1
        ends = ends or (not at_once and self.is_ending and self.due(step, self._vote))
        if ends:
            self._num_votes += 1
            self._vote = f"ending/{self._num_votes}"
        return ends

    def _is_carried(self) -> bool:
        """Wish to end at the place to come, and wait until each rank has wished it there, or has passed the place."""
        store, here, ranks = self.store, self.num_passed + 1, range(self.num_ranks)
        store.set(f"{self._vote}/wished/{self.rank}", str(here))
        store.set(self._vote, "")

        def place(which: str, rank: int) -> int:
            key = f"{self._vote}/{which}/{rank}"
            return int(store.get(key)) if store.check([key]) else 0

        def missing() -> list[int]:
            return [rank for rank in ranks if max(place("passed", rank), place("wished", rank)) < here]

        if not poll(lambda: not missing(), self.timeout_s):
            self._refuse("is to end training (trainer.should_stop)", missing())
        return all(place("wished", rank) == here for rank in ranks)

    def _refuse(self, what: str, missing: Sequence[int]) -> NoReturn:
        late = ", ".join(map(str, missing))
        raise RankError(f"rank {self.rank} {what} and waited {self.timeout_s:g} s for rank {late}.")

    def agreed(self, received: bool, step: int, stretch: str = TRAINING) -> bool:
        """Whether to stop now, as `due`, if any rank was asked to, this one if `received`; before every micro-batch."""
        if received and not self.armed:
            self.request(signal.SIGTERM)
        stops = self.armed and self.due(step, stretch)
        self.stopped_by = self.signal if stops else None
        return stops

    def due(self, step: int, stretch: str = TRAINING) -> bool:
        """Whether to stop now; the answer is the same on all ranks at the same step.

        Args:
            step: number of steps of the stretch that this rank has finished.
            stretch: what is stopped: training, or one validation.
        """
        for device in self._devices:
            torch.accelerator.synchronize(device)
        if stretch not in self._stops_at:
            self._stops_at[stretch] = None
            self.store.set(f"stop/{stretch}/armed/{self.rank}", "")
        announcement = f"stop/{stretch}/step"
        if self._stops_at[stretch] is None:
            if self.rank == 0 and self.store.check([f"stop/{stretch}/armed/{rank}" for rank in range(self.num_ranks)]):
                self.store.set(announcement, str(step + 1))
            if self.store.check([announcement]):
                self._stops_at[stretch] = int(self.store.get(announcement))
        stop = self._stops_at[stretch]
        return stop is not None and step >= stop

    def stops_validation(self, received: bool, number: int, num_batches: int, ended: bool) -> bool:
        """Whether all ranks stop within a validation; called after each of its batches, `number` is its own in the run.

        Args:
            received: as in `agreed`.
            num_batches: batches that this rank has finished.
            ended: these are all of this rank's; then it waits for the others, and all get the same answer.
        """
        stretch = f"validation {number}"
        stops = self.agreed(received, num_batches, stretch)
        if not (stops or ended):
            return False

        def arm() -> None:
            if self.armed:  # the others wait for this rank to be armed
                self.due(num_batches, stretch)

        place, value = f"stop/{stretch}/ended", str(int(stops and not ended))
        told, missing = meet(self.store, place, self.rank, self.num_ranks, value, self.timeout_s, arm)
        if missing:
            self._refuse("is at the end of a validation", missing)
        self.stopped_by = self.signal if "1" in told else None
        return "1" in told
