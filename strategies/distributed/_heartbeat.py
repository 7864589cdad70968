"""Publish, from a thread in every rank, where it is, so that ranks that wait for it can name it.

Under NCCL a rank waits for the others in native code, for the device, where no error arrives if one of them has failed
or hangs. There the thread itself names the rank at fault, and then aborts NCCL's communicators: the wait ends, and the
main thread fails, too.
"""

import json
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed import Store
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ..core.files import is_library
from ._stop import StopAgreement
from .process_exit import nccl
from .store import RANK_FAILED, another_connection, is_hosted_by_agent, silence

WAITS_FOR_WORKER = _MultiProcessingDataLoaderIter._get_data.__code__
"""What runs while the workers of a DataLoader have no batch for it."""

BEAT_S = 0.2
"""Seconds between two heartbeats of few ranks."""

BEATS_PER_S = 256
"""Heartbeats per second of all ranks together, at most: they go to one store."""

_SILENT_BEATS = 4
"""Heartbeats without which a rank counts as gone."""

_FAILED = "failed"

_STUCK = 0.95
"""Fraction of `timeout_s` at one place after which a rank under NCCL counts as stuck: before torch ends the process."""

_log = logging.getLogger(__name__)

_COMMUNICATION = ("gloo", "nccl", "connection", "timed out", "timeout", "peer", "socket", "tcpstore", "broken pipe")


class Heartbeat(NamedTuple):
    """A rank's heartbeat: their number, its optimizer steps and calls of parts, and the line of the user's code."""

    num: int = 0
    step: int = 0
    calls: int = 0
    place: str = ""


class HeartbeatMonitor:
    """Sends the heartbeats of this rank and reads those of the others.

    Attributes:
        count_steps: returns the number of optimizer steps that this rank has finished.
        count_calls: returns the number of calls that ranks make in one order.
    """

    def __init__(
        self, store: Store, rank: int, num_ranks: int, stop_agreement: StopAgreement, timeout_s: float
    ) -> None:
        self.store: Any = store  # of which each thread has a connection of its own, as requests on one wait
        self.rank, self.num_ranks, self.timeout_s = rank, num_ranks, timeout_s
        self.stop_agreement = stop_agreement
        self.beat_s = max(BEAT_S, num_ranks / BEATS_PER_S)
        self.beat = Heartbeat()
        self.count_steps: Callable[[], int] = lambda: 0
        self.count_calls: Callable[[], int] = lambda: 0
        self._failed_at = ""
        self._num_beats_here = 0
        self._has_aborted = False
        self._main = threading.main_thread().ident or 0
        self._ended = threading.Event()
        own = (another_connection(self.store),)
        self._thread = threading.Thread(target=self._run, args=own, name="evener-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        RANK_FAILED.clear()
        self._thread.start()

    def end(self) -> None:
        """Stop the thread."""
        self._ended.set()
        self._thread.join(timeout=5)

    def _run(self, store: Store) -> None:
        try:
            while not self._ended.wait(self.beat_s):
                self.stop_agreement.listen(store)
                if not RANK_FAILED.is_set() and store.check([_FAILED]):
                    RANK_FAILED.set()
                last, place = self.beat, self._failed_at or self._place()
                self.beat = Heartbeat(last.num + 1, self.count_steps(), self.count_calls(), place)
                is_here = (last.step, last.place) == (self.beat.step, place)
                self._num_beats_here = self._num_beats_here + 1 if is_here else 0
                store.set(f"beat/{self.rank}", json.dumps(self.beat))
                if RANK_FAILED.is_set() or self._num_beats_here * self.beat_s > _STUCK * self.timeout_s:
                    self._abort_waiting()
        except Exception:  # noqa: BLE001  # the store ended with its host; the main thread fails by itself
            RANK_FAILED.set()
            self._abort_waiting()

    def _abort_waiting(self) -> None:
        """Name the rank at fault and abort NCCL's communicators, once, unless this rank is at fault itself."""
        backend = None if self._has_aborted or self._failed_at else nccl()
        if backend is not None:
            self._has_aborted = True
            # in a thread of its own: without heartbeats meanwhile this rank would be named by the others
            threading.Thread(target=self._name_and_abort, args=(backend,), name="evener-abort", daemon=True).start()

    def _name_and_abort(self, backend: Any) -> None:
        store = another_connection(self.store)  # the main thread may be waiting on its own
        self._ended.wait(_SILENT_BEATS * self.beat_s)  # until the one that failed has published its error
        _log.error("rank %d ends its communication: %s", self.rank, self.culprits(store) or "it waits too long.")
        backend.abort()

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
            if self.store.check([f"failed/{rank}"]):
                return f" because it failed with {self.store.get(f'failed/{rank}').decode()}"
            if not self.store.check([f"beat/{rank}"]):
                return " and has sent no heartbeat"
            beat = Heartbeat(*json.loads(self.store.get(f"beat/{rank}")))
        except RuntimeError:
            return "; the store that all ranks share is gone"
        return f"; it was at step {beat.step}, {beat.place}"

    def culprits(self, store: Store | None = None) -> str:
        """Name the ranks that failed, stopped sending heartbeats, or are behind; empty if nothing is known."""
        try:
            return self._culprits(store or self.store)
        except RuntimeError as exc:
            gone = "Rank 0's process, which hosted the store, is gone."
            return silence(exc) or (
                gone if self.rank and not is_hosted_by_agent() else "The store of the ranks is gone."
            )

    def _culprits(self, store: Store) -> str:
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        failed = [rank for rank in others if store.check([f"failed/{rank}"])]
        if failed:
            texts = [f"rank {rank} failed with {store.get(f'failed/{rank}').decode()}" for rank in failed]
            return "; ".join(texts) + "."
        first = self.beats(store)
        self._ended.wait(_SILENT_BEATS * self.beat_s)
        second = self.beats(store)
        silent = [rank for rank in others if second[rank].num == first[rank].num]
        if silent:
            return " ".join(f"rank {rank} is gone{self.where(rank)}." for rank in silent)
        furthest = max(second[rank].step for rank in range(self.num_ranks))
        behind = [rank for rank in others if second[rank].step < furthest] or others
        return " ".join(f"rank {rank} is at step {second[rank].step}, {second[rank].place}." for rank in behind)

    def beats(self, store: Store) -> list[Heartbeat]:
        """The last heartbeat of every rank."""
        keys = [f"beat/{rank}" for rank in range(self.num_ranks)]
        if store.check(keys):
            return [Heartbeat(*json.loads(beat)) for beat in store.multi_get(keys)]
        return [Heartbeat(*json.loads(store.get(key))) if store.check([key]) else Heartbeat() for key in keys]


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
        if own.f_code is WAITS_FOR_WORKER:
            waits_for = ", waiting for a data worker"
        own = own.f_back
    line = own or frame
    text = f"{Path(line.f_code.co_filename).name}:{line.f_lineno} in {line.f_code.co_name}"
    inner = f"{frame.f_code.co_name} of {Path(frame.f_code.co_filename).name}"
    return text if line is frame else f"{text} (in {inner}{waits_for})"
