"""Stop all ranks at the same step after a signal to any of them; other steps only read one attribute.

    rank 0   ── step 7 ── ● armed ── step 8 ── all are armed: "stop at 10" ── step 9 ── ■ 10
    rank 1   ── step 7 ── step 8 ── ● armed ── step 9 ────────────────────────────────── ■ 10

A thread receives the request and arms its rank. From then on the rank checks the store between optimizer steps. When
all ranks are armed, rank 0 announces the step to stop at, before it starts the step before that one. No rank can pass
it unaware: it would need rank 0's gradients of a step that rank 0 starts after the announcement.

A validation is such a stretch of steps too, its batches. Ranks may have unequal numbers of them and nothing in common
until all are through, so each rank then says whether it has stopped or ended, and one that stopped stops all.

A loop also ends where `trainer.should_stop` is set: by the same values on all ranks, which then end there, as one
device does, or by one rank's own. The rank that finds it set says so, and waits until every rank has said the same
there or has gone on. If one has gone on, all end later, at a step that rank 0 announces as after a signal.

The rest of an epoch is skipped where `on_train_batch_start` returns -1 on all ranks, and refused where one goes on.
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

ENDING = "ending"
"""What wishes of ranks to end training are called in the store."""

SKIPPING = "skipping"
"""What wishes of ranks to skip the rest of an epoch are called in the store."""


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
        num_passed: places at which this rank could have ended training, and has gone on.
        num_begun: batches at whose start this rank could have skipped the rest of the epoch, and has gone on.
    """

    def __init__(
        self, rank: int, num_ranks: int, store: Store, timeout_s: float = 1800.0, devices: Sequence[torch.device] = ()
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.store = store
        self.timeout_s = timeout_s
        self._devices = [device for device in devices if is_accelerator(device)]
        self.armed = False
        self.signal: int | None = None
        self.stopped_by: int | None = None
        self._told = False
        self._stops_at: dict[str, int | None] = {}
        self.num_passed = 0
        self._num_ended = 0  # times that all ranks have ended; a hook may have them go on
        self._ends_later = -1  # the number of the end that is to come
        self.num_begun = self._num_skipped = 0

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
        number = self._num_ended
        wishes = {f"{ENDING}/{number}": self.num_passed, f"{SKIPPING}/{self._num_skipped}": self.num_begun}
        for name, passed in wishes.items():
            if store.check([name]):
                store.set(f"{name}/passed/{self.rank}", str(passed))
        if store.check([f"{ENDING}/{number}/later"]):
            self._ends_later = number

    @property
    def is_ending(self) -> bool:
        """Whether a rank has wished to end training where others went on, so that all end soon."""
        return self._ends_later == self._num_ended

    def ends(self, wished: bool, step: int, at_once: bool = False) -> bool:
        """Whether training ends here; the answer is the same on all ranks at the same place.

        Args:
            wished: this rank's loop would end (`trainer.should_stop`).
            step: as in `due`.
            at_once: ranks may wait for each other here, so that all end if one is to; else all do if all are to.
        """
        if at_once:
            if ends := any(gather_objects(wished or self.is_ending)):
                self.have_ended()
            else:
                self.num_passed += 1
            return ends
        name = f"{ENDING}/{self._num_ended}"
        if wished and not self.is_ending:
            missing, going = self._wish(name, self.num_passed + 1)
            if missing:
                raise RankError(
                    f"rank {self.rank} is to end training (trainer.should_stop) and waited {self.timeout_s:g} s for "
                    f"rank {missing}."
                )
            if not going:
                self.have_ended()
                return True
            self.store.set(f"{name}/later", "")
            self._ends_later = self._num_ended
        self.num_passed += 1
        if self.is_ending and self.due(step, name):
            self.have_ended()
            return True
        return False

    def have_ended(self) -> None:
        """Learn that all ranks end training here."""
        self.num_passed += 1
        self._num_ended += 1

    def skip(self, where: str) -> None:
        """Learn that all ranks skip the rest of the epoch; called by each that does, `where` is the batch in messages.

        Raises:
            RankError: another rank goes on with this batch, or did not come in time.
        """
        missing, going = self._wish(f"{SKIPPING}/{self._num_skipped}", self.num_begun + 1)
        if missing:
            raise RankError(f"rank {self.rank}: on_train_batch_start returned -1 {where}, rank {missing} did not come.")
        if going:
            raise RankError(
                f"rank {self.rank}: on_train_batch_start returned -1 {where}, but not on rank {going}, which waits "
                "for its gradients. Return -1 on all ranks, or set self.trainer.should_stop, on which ranks agree."
            )
        self._num_skipped += 1

    def _wish(self, name: str, here: int) -> tuple[str, str]:
        """Say what this rank wishes at a place, and wait until each rank has wished it, or has passed the place.

        Returns:
            The ranks that have not come in time, and those that have not wished it here.
        """
        self.store.set(f"{name}/wished/{self.rank}", str(here))
        self.store.set(name, "")
        self.store.set(NEWS, "")

        def place(what: str, rank: int) -> int:
            key = f"{name}/{what}/{rank}"
            return int(self.store.get(key)) if self.store.check([key]) else 0

        def missing() -> list[int]:
            return [rank for rank in range(self.num_ranks) if max(place("passed", rank), place("wished", rank)) < here]

        poll(lambda: not missing(), self.timeout_s)
        going = [rank for rank in range(self.num_ranks) if place("wished", rank) != here]
        return ", ".join(map(str, missing())), ", ".join(map(str, going))

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
