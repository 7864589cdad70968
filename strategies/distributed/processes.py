"""The processes of a run: fork them, pass signals on, watch them, and end them in time, in order, with their parent."""

import atexit
import ctypes
import gc
import math
import multiprocessing
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from .store import RANK_FAILED, leave_store

PR_SET_PDEATHSIG = 1
_OMP_PAUSE_HARD = 2
ASK_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # which end a run after its current step
ONE_REQUEST_S = 0.3  # within which signals are one: `timeout` and shells send theirs to a process and to its group


class RankProcesses:
    """The processes of one machine's ranks, looked at each `poll_s` seconds: the others are killed `grace_s` after one
    has failed, or, and then noted as `late`, `alone_s` after one has ended in order.
    """

    def __init__(self, poll_s: float, grace_s: float, alone_s: float = math.inf) -> None:
        self.processes: list[BaseProcess] = []
        self.late: list[int] = []
        self._poll_s, self._grace_s, self._alone_s = poll_s, grace_s, alone_s
        self._deadline_s = math.inf

    def join(self, is_stopping: Callable[[], bool] = lambda: False) -> int | None:
        """Wait for all; return who failed first, or was killed. While `is_stopping`, that does not end the others."""
        failed, ends_alone_s = None, math.inf
        while left := {rank: process for rank, process in enumerate(self.processes) if process.exitcode is None}:
            if failed is None and not is_stopping() and (failed := self._failed()) is not None:
                self.end(signal.SIGTERM, self._grace_s)
            elif len(left) < len(self.processes):
                ends_alone_s = min(ends_alone_s, time.monotonic() + self._alone_s)
            if time.monotonic() > min(self._deadline_s, ends_alone_s):
                self.late = self.late or ([*left] if failed is None and math.isinf(self._deadline_s) else [])
                self.end(signal.SIGKILL)
            self._wait(left)
        return self._failed() if failed is None else failed

    def _wait(self, left: Mapping[int, BaseProcess]) -> None:
        """Wait until one of those that are left may have ended."""
        # what a rank has forked, such as a data worker, may hold its sentinel for longer than the rank lives
        wait([process.sentinel for process in left.values()], self._poll_s)

    def _failed(self) -> int | None:
        statuses = {rank: status for rank, process in enumerate(self.processes) if (status := process.exitcode)}
        return min(statuses, key=lambda rank: statuses[rank] > 0, default=None)

    def end(self, signum: int, within_s: float = math.inf) -> None:
        """Send a signal to those that are alive, which are killed if they have not ended within some seconds."""
        self._deadline_s = min(self._deadline_s, time.monotonic() + within_s)
        for process in self.processes:
            if process.exitcode is None and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)


@dataclass
class StopRequests:
    """What signals have asked a process to do: the first one, when it came, and who handled signals before."""

    signum: int | None = None
    since_s: float = 0.0
    handlers: dict[int, Any] = field(default_factory=dict)


_heard: StopRequests | None = None  # within `handled`


@contextmanager
def handled(
    stop: Callable[[bool, int, FrameType | None], None], signals: Collection[int] = ASK_TO_STOP
) -> Generator[StopRequests]:
    """Handle signals that ask to stop inside the block, unless they are ignored; blocks share the requests it yields.

    `stop` is called with False for the first signal, and with True where Ctrl-C asks to end at once after a request.
    """
    global _heard
    outer, requests = _heard, _heard or StopRequests()

    def hear(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:
            leave_terminal()
        if requests.signum is None:
            requests.signum, requests.since_s = signum, time.monotonic()
            stop(False, signum, frame)
        elif signum == signal.SIGINT and time.monotonic() - requests.since_s > ONE_REQUEST_S:
            stop(True, signum, frame)

    in_main_thread = threading.current_thread() is threading.main_thread()
    heard = [signum for signum in signals if in_main_thread and signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, hear) for signum in heard}
    requests.handlers = before | requests.handlers
    _heard = requests
    try:
        yield requests
    finally:
        _heard = outer
        for signum, former in before.items():
            signal.signal(signum, former)


def handle_no_more() -> None:
    """Give signals back to who handled them before, in a process that was forked within `handled`."""
    global _heard
    for signum, former in (_heard.handlers if _heard else {}).items():
        signal.signal(signum, former)
    _heard = None


def leave_terminal() -> None:
    """Let output that goes to a terminal go nowhere: the terminal is closed, and writing to it is an error."""
    for descriptor in (1, 2):
        with suppress(OSError):  # it was closed before
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


_os_fork = os.fork


def fork() -> int:
    """Fork this process as `os.fork` does, once more where the new one does not come as far as Python.

    A thread of gloo that drops a tensor adds itself to Python's list of threads, without the GIL. A process that is
    forked meanwhile waits (Python 3.11) for the lock of this list, which nobody has there, before it runs anything.
    """
    for patience_s in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0):
        begun, begins = os.pipe()
        pid = _os_fork()
        if not pid:
            os.close(begun)
            os.close(begins)
            return 0
        os.close(begins)
        has_begun = wait([begun], patience_s)  # its end of the pipe is closed
        os.close(begun)
        if has_begun:
            return pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    raise RuntimeError("A process that is forked here does not begin.")


openmp_released = False  # of the process from which this one was forked


@contextmanager
def forking() -> Generator[None]:
    """Fork processes inside the block that don't wait for threads of this one, and share its memory, of which a garbage
    collection, which writes to every object, would make copies.
    """
    global openmp_released
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    # forks have none of its threads; where OpenMP can't let them go (before version 5.0), a fork has one
    openmp_released = pause is not None and pause(_OMP_PAUSE_HARD) == 0
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel (Linux) to end this process with its parent; at once if that, of a known id, is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def die_with_starter(by_kernel: bool = True) -> None:
    """Have a process that `multiprocessing` has started end with its starter, or, if `by_kernel`, that one's thread."""
    starter: Any = multiprocessing.parent_process()

    def die_with_it() -> None:
        starter.join()
        os.kill(os.getpid(), signal.SIGKILL)

    if by_kernel and multiprocessing.current_process().__class__.__name__ != "ForkServerProcess":
        die_with_parent(starter and starter.pid)
    else:  # the kernel takes it for a child of the fork server
        threading.Thread(target=die_with_it, name="evener-parent", daemon=True).start()


def leave_group() -> None:
    """End torch's process group, unless a rank has failed, for which it would wait, and then leave its store."""
    if dist.is_initialized() and not RANK_FAILED.is_set():
        dist.destroy_process_group()
        gc.collect()  # modules hold the group in reference cycles, and its threads end with the last reference
    leave_store()


def end_process(status: int) -> NoReturn:
    """End this process without finalizing the interpreter, which a thread of torch's would occasionally abort."""
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # waits for non-daemon threads
        atexit.unregister(leave_group)  # the end of the process ends it
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        leave_store()
    finally:
        os._exit(status)
