"""Stop all ranks at the same step after a signal to any of them; other steps only read one attribute.

    rank 0   ── step 7 ── ● armed ── step 8 ── all are armed: "stop at 10" ── step 9 ── ■ 10
    rank 1   ── step 7 ── step 8 ── ● armed ── step 9 ────────────────────────────────── ■ 10

A thread receives the request and arms its rank, which from then on checks the store between optimizer steps. When all
ranks are armed, rank 0 announces the step to stop at, before it starts the step before that one. No rank can pass it
unaware: it would need rank 0's gradients of a step that rank 0 starts after the announcement.

A validation is such a stretch of steps too, its batches. Ranks may have unequal numbers of them and nothing in common
until all are through, so each rank then says whether it has stopped or ended, and one that stopped stops all.

Ranks vote on what each may find by itself: to end where `trainer.should_stop` is set, and to skip the rest of an epoch
where `on_train_batch_start` returns -1. If all do so at one place, it happens there, as on one device. If some go on,
all end later, at a step that rank 0 announces as after a signal; to skip is refused.
"""

import signal
from collections.abc import Sequence

import torch
from torch.distributed import Store

from ..core.devices import is_accelerator
from .objects import gather_objects
from .store import RankError, meet, poll

NEWS = "news"
"""Set in the store along with a request to stop or a failure, so that ranks need ask for one thing only."""

REQUEST = "stop/requested"
TRAINING = "training"
"""The stretch of all optimizer steps."""


class Vote:
    """Whether all ranks wish the same at one of the places that all pass in the same order.

    Attributes:
        key: what the next vote is called in the store.
        num_passed: places that this rank has passed.
    """

    def __init__(self, name: str, agreement: "StopAgreement") -> None:
        self._name, self._agreement = name, agreement
        self.key, self.num_passed, self._number = f"{name}/0", 0, 0

    def answer(self, store: Store) -> None:
        """Tell ranks that wait in a vote which place this one has passed; called regularly by a thread."""
        key, passed = self.key, self.num_passed
        if store.check([key]):
            store.set(f"{key}/passed/{self._agreement.rank}", str(passed))

    def wish(self, what: str) -> str:
        """Wish something at the place to come, and wait until each rank has wished it there, or has passed the place.

        Returns:
            The ranks that have not wished it; without any the vote is carried.

        Raises:
            RankError: a rank did not come in time.
        """
        key, here, store, own = self.key, self.num_passed + 1, self._agreement.store, self._agreement.rank
        ranks, timeout_s = range(self._agreement.num_ranks), self._agreement.timeout_s
        store.set(f"{key}/wished/{own}", str(here))
        store.set(key, "")
        store.set(NEWS, "")

        def place(which: str, rank: int) -> int:
            found = f"{key}/{which}/{rank}"
            return int(store.get(found)) if store.check([found]) else 0

        def missing() -> str:
            return ", ".join(str(rank) for rank in ranks if max(place("passed", rank), place("wished", rank)) < here)

        if not poll(lambda: not missing(), timeout_s):
            raise RankError(f"rank {own} {what} and waited {timeout_s:g} s for rank {missing()}.")
        return ", ".join(str(rank) for rank in ranks if place("wished", rank) != here)

    def carried(self) -> None:
        """Begin the next vote."""
        self._number += 1
        self.key = f"{self._name}/{self._number}"


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
        ending: the vote to end training; its places are those at which a loop could end.
        skipping: the vote to skip the rest of an epoch; its places are the starts of batches.
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
        self.ending, self.skipping = Vote("ending", self), Vote("skipping", self)
        self._ends_later = ""  # the vote to end on which ranks have disagreed

    def request(self, signum: int) -> None:
        """Ask all ranks to stop. Safe to call from a signal handler: it only sets attributes."""
        self.signal = signum
        self.armed = True

    @property
    def has_news(self) -> bool:
        """Whether this rank has a request that the others don't know of."""
        return self.armed and not self._told

    def listen(self, store: Store) -> None:
        """Publish this rank's request and read those of others; called regularly by a thread."""
        if self.has_news and self.signal is not None:
            store.set(REQUEST, str(self.signal))
            store.set(NEWS, "")
            self._told = True
        elif not self.armed and store.check([REQUEST]):
            self.signal = int(store.get(REQUEST))
            self.armed = True
        key = self.ending.key
        self.ending.answer(store)
        self.skipping.answer(store)
        if store.check([f"{key}/later"]):
            self._ends_later = key

    @property
    def is_ending(self) -> bool:
        """Whether a rank has wished to end training where others went on, so that all end soon."""
        return self._ends_later == self.ending.key

    def ends(self, wished: bool, step: int, at_once: bool = False) -> bool:
        """Whether training ends here; the answer is the same on all ranks at the same place.

        Args:
            wished: this rank's loop would end (`trainer.should_stop`).
            step: as in `due`.
            at_once: ranks may wait for each other here, so that all end if one is to; else all do if all are to.
        """
        vote = self.ending
        if at_once:
            ends = any(gather_objects(wished or self.is_ending))
        else:
            ends = wished and not self.is_ending and not vote.wish("is to end training (trainer.should_stop)")
            if wished and not (ends or self.is_ending):
                self.store.set(f"{vote.key}/later", "")
                self._ends_later = vote.key
        vote.num_passed += 1
        ends = ends or (not at_once and self.is_ending and self.due(step, vote.key))
        if ends:
            vote.carried()
        return ends

    def skip(self, where: str) -> None:
        """Learn that all ranks skip the rest of the epoch; called by each that does, `where` is the batch in messages.

        Raises:
            RankError: another rank goes on with this batch, or did not come in time.
        """
        if going := self.skipping.wish(what := f"returned -1 from on_train_batch_start {where}"):
            raise RankError(
                f"rank {self.rank} {what}, but not on rank {going}, which waits for its gradients. Return -1 on all "
                "ranks, or set self.trainer.should_stop, on which ranks agree."
            )
        self.skipping.carried()

    def agreed(self, received: bool, step: int, stretch: str = TRAINING) -> bool:
        """Whether to stop now, as `due`, if any rank was asked to; called before every micro-batch.

        Args:
            received: whether this rank was asked to stop by other means than a signal.
        """
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
            raise RankError(
                f"rank {self.rank} waited {self.timeout_s:g} s at the end of a validation for rank "
                f"{', '.join(map(str, missing))}."
            )
        self.stopped_by = self.signal if "1" in told else None
        return "1" in told
