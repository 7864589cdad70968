"""Watch the processes of one machine's ranks; after the first failure those that are left end, within bounds."""

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import TypeAlias

from .process_exit import is_frozen, kill_frozen

LOOK_S = 0.1
"""Seconds between two looks at whether a rank is frozen; at the second one it is killed, if the run goes on then."""


Process: TypeAlias = BaseProcess | subprocess.Popen[bytes]


class RankProcesses:
    """The processes of one machine's ranks.

    Args:
        poll_s: seconds between two looks at them, at most.
        grace_s: seconds that the others have to end after one has failed.
        alone_s: seconds that they have after one has ended in order.

    Attributes:
        processes: one per rank.
        late: the ranks that were killed because they had not ended in time after others had done so in order.
    """

    def __init__(self, poll_s: float, grace_s: float, alone_s: float = math.inf) -> None:
        self.processes: list[Process] = []
        self.late: list[int] = []
        self._poll_s, self._grace_s, self._alone_s = poll_s, grace_s, alone_s
        self._deadline_s = math.inf
        self._frozen: set[int] = set()
        self._looked_s = 0.0

    def join(self, is_stopping: Callable[[], bool] = lambda: False) -> int | None:
        """Wait for all, and return the rank that failed first, or was killed, since others may have failed for that.

        While `is_stopping`, one that fails does not end the others.
        """
        failed, ends_alone_s = None, math.inf
        while left := {rank: process for rank, process in enumerate(self.processes) if status_of(process) is None}:
            if failed is None and not is_stopping() and (failed := self._failed()) is not None:
                self.end(signal.SIGTERM, self._grace_s)
            elif len(left) < len(self.processes):
                ends_alone_s = min(ends_alone_s, time.monotonic() + self._alone_s)
            if not math.isinf(self._deadline_s):
                kill_frozen(process.pid for process in left.values() if process.pid is not None)
            elif time.monotonic() - self._looked_s > LOOK_S:
                pids = {process.pid for rank, process in left.items() if process.pid and self._can_lose(rank)}
                before, self._frozen = self._frozen, set(filter(is_frozen, pids))
                kill_frozen(before & self._frozen)
                self._looked_s = time.monotonic()
            if time.monotonic() > min(self._deadline_s, ends_alone_s):
                self.late = self.late or ([*left] if failed is None else [])
                self.end(signal.SIGKILL)
            self._wait(left)
        return self._failed() if failed is None else failed

    def _wait(self, left: Mapping[int, Process]) -> None:
        """Wait until one of those that are left may have ended."""
        # what a rank has forked, such as a data worker, may hold its sentinel for longer than the rank lives
        wait([process.sentinel for process in left.values() if isinstance(process, BaseProcess)], self._poll_s)

    def _can_lose(self, rank: int) -> bool:
        """Whether the run goes on if a rank is killed."""
        return False

    def _failed(self) -> int | None:
        statuses = {rank: status for rank, process in enumerate(self.processes) if (status := status_of(process))}
        return min(statuses, key=lambda rank: statuses[rank] > 0, default=None)

    def end(self, signum: int, within_s: float = math.inf) -> None:
        """Send a signal to those that are alive, which are killed if they have not ended within some seconds."""
        self._deadline_s = min(self._deadline_s, time.monotonic() + within_s)
        for process in self.processes:
            if status_of(process) is None and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)


def status_of(process: Process) -> int | None:
    """The exit status of a process, negative for the signal that ended it; None while it lives."""
    return process.exitcode if isinstance(process, BaseProcess) else process.poll()
