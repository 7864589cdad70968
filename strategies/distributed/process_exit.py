"""End the processes of a run with their parent, in time, and in order."""

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .store import RANK_FAILED, leave_store

PR_SET_PDEATHSIG = 1
_OMP_PAUSE_HARD = 2

FORKED_GRACE_S = 300.0
"""Most seconds from SIGTERM to the end of a process started by a strategy: time to write a large checkpoint."""

LAST_WORDS_S = 2.0
"""Seconds that a process has to stop after a rank has failed: time to name it, which takes one, and to write logs."""


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel (Linux) to end this process with its parent; at once if that, of a known id, is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def fork() -> int:
    """Fork this process as `os.fork` does, once more where the new one does not come as far as Python.

    A thread of gloo that drops a tensor adds itself to Python's list of threads, without the GIL. A process that is
    forked meanwhile waits (Python 3.11) for the lock of this list, which nobody has there, before it runs anything.
    """
    for patience_s in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            if not (pid := _os_fork()):
                with suppress(OSError):
                    ours.close()
                    theirs.send(b".")
                    if theirs.recv(1):
                        return 0
                os._exit(1)  # it was given up
            theirs.close()
            ours.settimeout(patience_s)
            with suppress(TimeoutError):
                if ours.recv(1):
                    ours.send(b".")
                    return pid
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    raise RuntimeError("A process that is forked here does not begin.")


_os_fork = os.fork


_given_up: list[Any] = []


def give_up_groups() -> None:
    """Leave all groups of processes without an end of their threads, for which a fork of this process would wait."""
    if dist.is_initialized():
        _given_up.extend(dist.distributed_c10d._world.pg_map)  # their last references would end them
        dist.destroy_process_group()


def die_with_starter(by_kernel: bool = True) -> None:
    """Ask that a process that `multiprocessing` has started ends with the one that asked for it.

    The kernel, which would end it with that one's thread, is not asked unless `by_kernel`.
    """
    starter: Any = multiprocessing.parent_process()

    def die_with_it() -> None:
        starter.join()
        os.kill(os.getpid(), signal.SIGKILL)

    if by_kernel and multiprocessing.current_process().__class__.__name__ != "ForkServerProcess":
        die_with_parent(starter and starter.pid)
    else:  # the kernel takes it for a child of the fork server
        threading.Thread(target=die_with_it, name="evener-parent", daemon=True).start()


ASK_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a run after its current step."""

ONE_REQUEST_S = 0.3
"""Seconds within which signals are one request: `timeout` and shells send theirs to a process and to its group."""


@dataclass
class StopRequests:
    """What signals have asked a process to do.

    Attributes:
        signum: the first signal; None before it.
        since_s: when it came.
        handlers: who handled the signals before.
    """

    signum: int | None = None
    since_s: float = 0.0
    handlers: dict[int, Any] = field(default_factory=dict)


_heard: StopRequests | None = None
"""What this process was asked within `handled`."""


@contextmanager
def handled(
    stop: Callable[[bool, int, FrameType | None], None], signals: Collection[int] = ASK_TO_STOP
) -> Generator[StopRequests]:
    """Handle signals that ask to stop inside the block; one that is ignored, as nohup does with SIGHUP, stays so.

    Args:
        stop: called with False for the first signal, and with True where Ctrl-C asks to end at once after a request;
            other signals repeat it.

    Yields:
        The requests, which a block within another one shares with it.
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


def leave_in_time(grace_s: float, requests: Collection[int] = ASK_TO_STOP) -> None:
    """Kill this process if it does not end within some seconds of being asked to stop.

    A thread receives the signal even while the main thread waits for a rank that never answers, where no Python signal
    handler runs. If another rank has failed, there are fewer seconds.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def kill_late() -> None:
        while os.read(read_end, 1)[0] not in requests:
            continue
        deadline = time.monotonic() + grace_s
        if RANK_FAILED.wait(grace_s):
            time.sleep(max(0.0, min(LAST_WORDS_S, deadline - time.monotonic())))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill_late, name="evener-leave", daemon=True).start()


def leave_group() -> None:
    """End torch's process group, unless a rank has failed, for which it would wait, and then leave its store."""
    if dist.is_initialized() and not RANK_FAILED.is_set():
        dist.destroy_process_group()
        gc.collect()  # modules hold the group in reference cycles, and its threads end with the last reference
    leave_store()


def nccl() -> Any:
    """The NCCL backend of the process group; None without one."""
    if not dist.is_initialized() or "nccl" not in dist.get_backend_config():
        return None
    world: Any = dist.group.WORLD
    return world._get_backend(torch.device("cuda"))


def end_process(status: int) -> NoReturn:
    """End this process as `multiprocessing` does: flush everything, but do not finalize the interpreter.

    torch's threads (of gloo, the store, autograd) still run then, and one of them would occasionally abort it.
    """
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # waits for non-daemon threads
        atexit.unregister(leave_group)  # the end of the process ends it
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        leave_store()
    finally:
        os._exit(status)


_openmp_released = False
"""Whether the process from which this one was forked had released its threads of OpenMP."""


@contextmanager
def forking() -> Generator[None]:
    """Fork processes inside the block that share the memory of this one, and don't wait for its threads.

    A garbage collection writes to every object, so that each process would copy all memory that it shares with this
    one: what exists now is kept out of collections, in forked processes for good.
    """
    global _openmp_released
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    # forks have none of its threads; where OpenMP can't let them go (before version 5.0), a fork has one
    _openmp_released = pause is not None and pause(_OMP_PAUSE_HARD) == 0
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def is_frozen(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP), so that it can't react to being asked to end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended, or this is no Linux
        return False


def kill_frozen(pids: Iterable[int]) -> None:
    """Kill those of some processes that are stopped (SIGSTOP)."""
    for pid in filter(is_frozen, pids):
        os.kill(pid, signal.SIGKILL)


def prepare_forked(timeout_s: float) -> None:
    """Set up a process that was started by a strategy, whose limit for waits is `timeout_s`; called first in it."""
    die_with_starter()
    leave_in_time(min(timeout_s, FORKED_GRACE_S), [signal.SIGTERM, signal.SIGUSR1])  # a terminal's reach the script
    if multiprocessing.current_process().__class__.__name__ != "SpawnProcess" and not _openmp_released:
        torch.set_num_threads(1)
