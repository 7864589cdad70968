"""Watch the ranks from a thread in each: tell where this one is, name those at fault, and agree on when to stop.

    rank 0   ── step 7 ── ● armed ── step 8 ── all are armed: "stop at 10" ── step 9 ── ■ 10
    rank 1   ── step 7 ── step 8 ── ● armed ── step 9 ────────────────────────────────── ■ 10

The thread that hears of a request arms its rank, which from then on looks at the store between steps. No rank can pass
the step that rank 0 announces: it would need its gradients of a step that rank 0 starts after the announcement.
"""

import json
import logging
import math
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ..core.devices import is_accelerator
from ..core.files import is_library
from .objects import gather_objects
from .store import RANK_FAILED, RankError, another_connection, is_hosted_by_agent, meet, poll, silence

BEAT_S = 0.2  # between two heartbeats of few ranks
BEATS_PER_S = 256  # of all ranks together, at most: they go to one store
_SILENT_BEATS = 4  # without which a rank counts as gone
_STUCK = 0.95  # of `timeout_s` at one place, after which a rank under NCCL is told: before torch ends the process
_WAITS_FOR_WORKER = _MultiProcessingDataLoaderIter._get_data.__code__  # while a DataLoader's workers have no batch
_FAILED, _REQUEST, _ENDING, TRAINING = "failed", "stop/requested", "ending", "training"
_log = logging.getLogger(__name__)
_COMMUNICATION = ("gloo", "nccl", "connection", "timed out", "timeout", "peer", "socket", "tcpstore", "broken pipe")


class Heartbeat(NamedTuple):
    """Of a rank: numbers of heartbeats, optimizer steps, places passed and calls, and the line of the user's code."""

    num: int = 0
    step: int = 0
    passed: int = 0
    calls: int = 0
    place: str = ""


def heartbeats(store: Store, num_ranks: int) -> list[Heartbeat]:
    """The last heartbeat of every rank."""
    keys = [f"beat/{rank}" for rank in range(num_ranks)]
    if store.check(keys):
        return [Heartbeat(*json.loads(beat)) for beat in store.multi_get(keys)]
    return [Heartbeat(*json.loads(store.get(key))) if store.check([key]) else Heartbeat() for key in keys]


class StopAgreement:
    """Agrees with the other ranks on the step to stop at, for a `signal`, by which all are `stopped_by` then, or where
    a rank wishes to end; `is_ending`: while others went on. `num_passed` counts the places at which a loop could end.
    """

    def __init__(
        self, rank: int, num_ranks: int, store: Store, timeout_s: float = 1800.0, devices: Sequence[torch.device] = ()
    ) -> None:
        self.rank, self.num_ranks, self.store, self.timeout_s = rank, num_ranks, store, timeout_s
        self._devices = [device for device in devices if is_accelerator(device)]  # their host may run steps ahead
        self.is_ending = False
        self.signal: int | None = None  # set by signal handlers, and the thread that listens
        self.stopped_by: int | None = None
        self._stops_at: dict[str, int] = {}
        self.num_passed = 0

    def listen(self, store: Store) -> None:
        """Publish this rank's request, or read those of others; called regularly by a thread."""
        if self.signal is not None:
            store.set(_REQUEST, str(self.signal))
        elif store.check([_REQUEST]):
            self.signal = int(store.get(_REQUEST))
        self.is_ending = self.is_ending or store.check([_ENDING])

    def ends(self, wished: bool, step: int, at_once: bool = False) -> bool:
        """Whether all ranks end training here: where all have `wished` it, as one device; else, if some do, soon.

        `at_once`, where ranks may wait for each other, all do if one does.
        """
        if at_once:
            ends = any(gather_objects(wished or self.is_ending))
        elif not self.is_ending and self._all_wish():
            ends = True
        else:
            self.is_ending = True
            self.store.set(_ENDING, "")
            ends = self.due(step, _ENDING)
        self.num_passed += 1
        return ends

    def _all_wish(self) -> bool:
        """Wish to end at the place to come, and wait until each rank has wished it there, or has passed the place."""
        store, here = self.store, self.num_passed + 1
        keys = [f"wish/{here}/{rank}" for rank in range(self.num_ranks)]
        store.set(keys[self.rank], "")

        def missing() -> list[int]:
            beats = heartbeats(store, self.num_ranks)
            return [rank for rank, key in enumerate(keys) if not store.check([key]) and beats[rank].passed < here]

        if not poll(lambda: not missing(), self.timeout_s):
            self._refuse("is to end training (trainer.should_stop)", missing())
        return store.check(keys)

    def _refuse(self, what: str, missing: Sequence[int]) -> NoReturn:
        late = ", ".join(map(str, missing))
        raise RankError(f"rank {self.rank} {what} and waited {self.timeout_s:g} s for rank {late}.")

    def agreed(self, received: bool, step: int, stretch: str = TRAINING) -> bool:
        """Whether to stop now, as `due`, if any rank was asked to, this one if `received`; before every micro-batch."""
        if received and self.signal is None:
            self.signal = signal.SIGTERM
        stops = self.signal is not None and self.due(step, stretch)
        self.stopped_by = self.signal if stops else None
        return stops

    def due(self, step: int, stretch: str = TRAINING) -> bool:
        """Whether to stop after so many steps of a stretch, training or a validation; it is the same on all ranks."""
        for device in self._devices:  # so that the gradients of the last step have arrived
            torch.accelerator.synchronize(device)
        announcement = f"stop/{stretch}/step"
        if stretch not in self._stops_at:
            self.store.set(f"stop/{stretch}/armed/{self.rank}", "")
            if self.rank == 0 and self.store.check([f"stop/{stretch}/armed/{rank}" for rank in range(self.num_ranks)]):
                self.store.set(announcement, str(step + 1))
            if self.store.check([announcement]):
                self._stops_at[stretch] = int(self.store.get(announcement))
        return step >= self._stops_at.get(stretch, math.inf)

    def stops_validation(self, received: bool, number: int, num_batches: int, ended: bool) -> bool:
        """Whether all ranks stop within a validation, of a `number` in the run; called after each of its batches.

        Ranks may have unequal numbers of batches: one that has `ended` waits for the others, and one stops all.
        """
        stretch = f"validation {number}"
        stops = self.agreed(received, num_batches, stretch)
        if not (stops or ended):
            return False

        def arm() -> None:
            if self.signal is not None:  # the others wait for this rank to be armed
                self.due(num_batches, stretch)

        place, value = f"stop/{stretch}/ended", str(int(stops and not ended))
        told, missing = meet(self.store, place, self.rank, self.num_ranks, value, self.timeout_s, arm)
        if missing:
            self._refuse("is at the end of a validation", missing)
        self.stopped_by = self.signal if "1" in told else None
        return "1" in told


class HeartbeatMonitor:
    """Sends the heartbeats of this rank, and reads those of the others; `count_steps` and `count_calls` return how many
    optimizer steps it has finished, and calls that ranks make in one order.
    """

    def __init__(self, stopping: StopAgreement) -> None:
        self.stopping, self.rank, self.num_ranks = stopping, stopping.rank, stopping.num_ranks
        self.store: Any = stopping.store  # of which each thread has a connection of its own, as requests on one wait
        self.beat_s = max(BEAT_S, self.num_ranks / BEATS_PER_S)
        self.beat = Heartbeat()
        self.count_steps: Callable[[], int] = lambda: 0
        self.count_calls: Callable[[], int] = lambda: 0
        self._failed_at = ""
        self._main = threading.main_thread().ident or 0
        self._ended = threading.Event()
        own = (another_connection(self.store),)
        self._thread = threading.Thread(target=self._run, args=own, name="evener-watch", daemon=True)

    def start(self) -> None:
        RANK_FAILED.clear()
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(timeout=5)

    def _run(self, store: Store) -> None:
        try:
            num_here, stuck = 0, int(_STUCK * self.stopping.timeout_s / self.beat_s)
            while not self._ended.wait(self.beat_s):
                self.stopping.listen(store)
                if not RANK_FAILED.is_set() and store.check([_FAILED]):
                    RANK_FAILED.set()
                last, place = self.beat, self._failed_at or self._place()
                done = self.count_steps(), self.stopping.num_passed, self.count_calls()
                self.beat = Heartbeat(last.num + 1, *done, place)
                store.set(f"beat/{self.rank}", json.dumps(self.beat))
                num_here = num_here + 1 if (last.step, last.place) == (self.beat.step, place) else 0
                if num_here == stuck and waits_natively():
                    _log.error("rank %d waits at %s: %s", self.rank, place, self.culprits(another_connection(store)))
        except Exception:  # noqa: BLE001  # the store ended with its host; the main thread fails by itself
            RANK_FAILED.set()

    def _place(self) -> str:
        """Current line of the main thread. Keeps no reference to its frame, which would keep tensors alive."""
        frame = sys._current_frames().get(self._main)
        return place_of(frame) if frame is not None else ""

    def explain(self, exc: BaseException) -> None:
        """Report a failure to the other ranks; if a peer could not be reached, name that peer in the error instead."""
        frames = [frame for frame, _ in traceback.walk_tb(exc.__traceback__)]
        self._failed_at = place_of(frames[-1]) if frames else ""
        RANK_FAILED.set()
        is_own = not is_about_communication(exc)
        with suppress(RuntimeError):  # the store ended with its host: the others know
            self.store.set(_FAILED, "")
            if is_own:
                self.store.set(f"failed/{self.rank}", _described(exc))
        if not is_own and (culprits := self.culprits()):
            exc.args = (f"{culprits} The error on this rank was: {exc}",)

    def where(self, rank: int) -> str:
        """Describe what is known of a rank, as the end of a sentence about it."""
        try:
            told, beat = _failure(self.store, rank), heartbeats(self.store, self.num_ranks)[rank]
        except RuntimeError:
            return "; the store that all ranks share is gone"
        known = f"; it was at step {beat.step}, {beat.place}" if beat.num else " and has sent no heartbeat"
        return f" because it {told}" if told else known

    def culprits(self, connection: Any = None) -> str:
        """Name the ranks that failed, stopped sending heartbeats, or are behind; empty if nothing is known."""
        store, num = connection or self.store, self.num_ranks
        others = [rank for rank in range(num) if rank != self.rank]
        try:
            if failed := [f"rank {rank} {told}" for rank in others if (told := _failure(store, rank))]:
                return "; ".join(failed) + "."
            first = heartbeats(store, num)
            self._ended.wait(_SILENT_BEATS * self.beat_s)
            second = heartbeats(store, num)
        except RuntimeError as exc:
            by_rank_0 = self.rank and not is_hosted_by_agent()
            host = "Rank 0's process, which hosted the store," if by_rank_0 else "The store of the ranks"
            return silence(exc) or f"{host} is gone."
        if silent := [rank for rank in others if second[rank].num == first[rank].num]:
            return " ".join(f"rank {rank} is gone{self.where(rank)}." for rank in silent)
        furthest = max(beat.step for beat in second)
        behind = [rank for rank in others if second[rank].step < furthest] or others
        return " ".join(f"rank {rank} is at step {second[rank].step}, {second[rank].place}." for rank in behind)


def waits_natively() -> bool:
    """Whether a rank waits for the others where no error arrives if one of them hangs: for its device, under NCCL."""
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


def _failure(store: Store, rank: int) -> str:
    key = f"failed/{rank}"
    return f"failed with {store.get(key).decode()}" if store.check([key]) else ""


def _described(exc: BaseException) -> str:
    frames = traceback.extract_tb(exc.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)] or list(frames)
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno}, {own[-1].name})" if own else ""
    text = " ".join(str(exc).split())[:300]
    return f"{type(exc).__name__}: {text}{where}".encode(errors="backslashreplace").decode()


def is_about_communication(exc: BaseException) -> bool:
    """Whether an error only says that a peer could not be reached."""
    text = str(exc).lower()
    dist_errors = (torch.distributed.DistError, torch.distributed.DistBackendError)
    return isinstance(exc, dist_errors) or (type(exc) is RuntimeError and any(word in text for word in _COMMUNICATION))


def place_of(frame: FrameType) -> str:
    """Describe the innermost line of the user's code in a stack, and the innermost function of all."""
    own: FrameType | None = frame
    waits_for = ""
    while own is not None and is_library(own.f_code.co_filename):
        if own.f_code is _WAITS_FOR_WORKER:
            waits_for = ", waiting for a data worker"
        own = own.f_back
    line = own or frame
    text = f"{Path(line.f_code.co_filename).name}:{line.f_lineno} in {line.f_code.co_name}"
    inner = f"{frame.f_code.co_name} of {Path(frame.f_code.co_filename).name}"
    return text if line is frame else f"{text} (in {inner}{waits_for})"
