"""A thread in every rank that tells the others where it is, so that whoever waits for it can name it."""

import json
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import Store

from ._stop import StopAgreement

BEAT_S = 0.2
"""Seconds between two signs of life."""

RANK_FAILED = threading.Event()
"""Set in every rank once any of them has failed: whoever is asked to stop then has no one to agree with."""

_FAILED = "failed"

_COMMUNICATION = ("gloo", "nccl", "connection", "timed out", "timeout", "peer", "socket", "tcpstore", "broken pipe")


@dataclass
class Heartbeat:
    """A rank's sign of life.

    Args:
        count: number of signs so far.
        step: optimizer steps finished.
        place: the line of the user's code that it is in, or the innermost line where there is none.
        error: what it failed with; empty while it lives.
    """

    count: int = 0
    step: int = 0
    place: str = ""
    error: str = ""


class HeartbeatMonitor:
    """Signs of life of this rank, and those of the others.

    Args:
        store: shared by all ranks; the thread uses a connection of its own.
        rank: this rank.
        num_ranks: number of ranks.
        stop_agreement: told about requests to stop.

    Attributes:
        count_steps: says how many optimizer steps this rank has finished.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, stop_agreement: StopAgreement) -> None:
        self.store = store
        self.rank = rank
        self.num_ranks = num_ranks
        self.stop_agreement = stop_agreement
        self.beat = Heartbeat()
        self.count_steps: Callable[[], int] = lambda: 0
        self._failed_at = ""
        self._main = threading.main_thread().ident or 0
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(_own_connection(store),), name="evener-watch", daemon=True
        )

    def start(self) -> None:
        """Begin."""
        RANK_FAILED.clear()
        self._thread.start()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(timeout=5)

    def _run(self, store: Store) -> None:
        try:
            while not self._ended.wait(BEAT_S):
                self.stop_agreement.listen(store)
                if not RANK_FAILED.is_set() and store.check([_FAILED]):
                    RANK_FAILED.set()
                self.beat.count += 1
                self.beat.step = self.count_steps()
                self.beat.place = self._failed_at or self._place()
                store.set(f"beat/{self.rank}", json.dumps(asdict(self.beat)))
        except Exception:  # noqa: BLE001  # the store has gone with its host; the main thread fails by itself
            RANK_FAILED.set()

    def _place(self) -> str:
        """Where the main thread is. No frame is kept until the next sign of life: its tensors would be kept with it."""
        frame = sys._current_frames().get(self._main)
        return place_of(frame) if frame is not None else ""

    def freeze(self, exc: BaseException) -> None:
        """Say from now on that this rank has failed, and is where the exception arose."""
        trace = exc.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        self._failed_at = place_of(trace.tb_frame) if trace is not None else ""
        RANK_FAILED.set()
        with suppress(RuntimeError):  # the store has gone with its host: the others know
            self.store.set(_FAILED, "")

    def tell(self, exc: BaseException) -> None:
        """Leave word of what this rank failed with."""
        frames = traceback.extract_tb(exc.__traceback__)
        own = [frame for frame in frames if not _is_library(frame.filename)] or list(frames)
        where = f" ({Path(own[-1].filename).name}:{own[-1].lineno}, {own[-1].name})" if own else ""
        text = " ".join(str(exc).split())[:300]
        self.store.set(f"failed/{self.rank}", f"{type(exc).__name__}: {text}{where}")

    def where(self, rank: int) -> str:
        """Say what is known of a rank, as the end of a sentence about it."""
        try:
            if self.store.check([f"failed/{rank}"]):
                return f" because it failed with {self.store.get(f'failed/{rank}').decode()}"
            if not self.store.check([f"beat/{rank}"]):
                return ", nor has it given any sign of life"
            beat = Heartbeat(**json.loads(self.store.get(f"beat/{rank}")))
        except RuntimeError:
            return ", and the store that rank 0 hosts is gone"
        return f"; it was at step {beat.step}, {beat.place}"

    def culprits(self) -> str:
        """Name the ranks that failed, or went silent, or are behind; empty where nothing is known."""
        try:
            return self._culprits()
        except RuntimeError:
            return "The store is gone, and with it rank 0's process, which hosted it." if self.rank else ""

    def _culprits(self) -> str:
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        failed = [rank for rank in others if self.store.check([f"failed/{rank}"])]
        if failed:
            texts = [f"rank {rank} failed with {self.store.get(f'failed/{rank}').decode()}" for rank in failed]
            return "; ".join(texts) + "."
        first = self._beats()
        self._ended.wait(4 * BEAT_S)
        second = self._beats()
        silent = [rank for rank in others if second[rank].count == first[rank].count]
        if silent:
            return " ".join(f"rank {rank} is gone{self.where(rank)}." for rank in silent)
        furthest = max(second[rank].step for rank in range(self.num_ranks))
        behind = [rank for rank in others if second[rank].step < furthest] or others
        return " ".join(f"rank {rank} is at step {second[rank].step}, {second[rank].place}." for rank in behind)

    def _beats(self) -> list[Heartbeat]:
        keys = [f"beat/{rank}" for rank in range(self.num_ranks)]
        return [
            Heartbeat(**json.loads(self.store.get(key))) if self.store.check([key]) else Heartbeat() for key in keys
        ]


def _own_connection(store: Any) -> Store:
    """A second connection: one that waits for an answer would keep the other waiting."""
    return store.clone()


def is_about_communication(exc: BaseException) -> bool:
    """Whether an error says that a peer could not be reached, rather than what went wrong."""
    text = str(exc).lower()
    dist_errors = (torch.distributed.DistError, torch.distributed.DistBackendError)
    return isinstance(exc, dist_errors) or (type(exc) is RuntimeError and any(word in text for word in _COMMUNICATION))


def place_of(frame: FrameType) -> str:
    """The innermost line of a stack that is the user's, and the innermost of all."""
    own: FrameType | None = frame
    while own is not None and _is_library(own.f_code.co_filename):
        own = own.f_back
    line = own or frame
    text = f"{Path(line.f_code.co_filename).name}:{line.f_lineno} in {line.f_code.co_name}"
    inner = f"{frame.f_code.co_name} of {Path(frame.f_code.co_filename).name}"
    return text if line is frame else f"{text} (in {inner})"


_ROOMS = tuple(str(Path(__file__).parents[2] / room) + os.sep for room in ("trainer", "strategies"))
_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), *_ROOMS, "<")


def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARIES)
