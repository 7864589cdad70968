"""End the processes of a run with their parent, in time, and in order."""

import atexit
import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from numbers import Number
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from lightning_fabric.accelerators import XLAAccelerator
from lightning_fabric.utilities import registry
from torchmetrics import Metric

from ..core.patching import replaced
from ..core.private import of_lightning, of_torch
from ._store_watch import RANK_FAILED
from .store import leave_store

PR_SET_PDEATHSIG = 1
_OMP_PAUSE_HARD = 2

FORKED_GRACE_S = 300.0
"""Most seconds from SIGTERM to the end of a process started by a strategy: time to reach the next step and write a
large checkpoint. The strategy's `timeout_s` may allow fewer. If another of the processes has failed or was killed,
their parent waits only a second longer than `LAST_WORDS_S`."""

LAST_WORDS_S = 2.0
"""Seconds that a process has to stop after a rank has failed, when there is no step to agree on: time to name it, which
takes one second, and to write logs to disk."""


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel (Linux) to end this process when its parent does, so that it does not outlive a killed parent.

    Args:
        parent: the parent's process id, if known; this process ends at once if the parent is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def _die_with(parent: Any) -> None:
    """End with the process that asked a fork server for this one, which the kernel takes for a child of the server."""
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


ASK_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a run after its current step."""


def leave_in_time(grace_s: float) -> None:
    """Kill this process if it does not end within some seconds of being asked to stop.

    A thread receives the signal even while the main thread waits for a rank that never answers, where no Python signal
    handler runs. torch's agent, and its launcher of plain scripts, would wait half a minute after a failure.

    Args:
        grace_s: seconds from a signal that asks to stop to the end; fewer if another rank has failed.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_kill_late, args=(read_end, grace_s), name="evener-leave", daemon=True).start()


def _kill_late(read_end: int, grace_s: float) -> None:
    while os.read(read_end, 1)[0] not in ASK_TO_STOP:
        continue
    deadline = time.monotonic() + grace_s
    if RANK_FAILED.wait(grace_s):
        time.sleep(max(0.0, min(LAST_WORDS_S, deadline - time.monotonic())))
    os.kill(os.getpid(), signal.SIGKILL)


def leave_group_at_exit() -> None:
    """End torch's process group before the interpreter exits: its threads must not outlive what they use."""
    atexit.unregister(leave_group)  # registered once, however many groups a process has had
    atexit.register(leave_group)


def leave_group() -> None:
    """End torch's process group and its threads, unless a rank has failed, because they would wait for it.

    The store is left last: NCCL's threads use it until their group has ended.
    """
    if dist.is_initialized() and not RANK_FAILED.is_set():
        dist.destroy_process_group()
        gc.collect()  # modules hold the group in reference cycles, and its threads end with the last reference
    leave_store()


def nccl() -> Any:
    """The NCCL backend of the process group; None without one."""
    if not dist.is_initialized() or "nccl" not in dist.get_backend_config():
        return None
    world: Any = dist.group.WORLD
    return of_torch.get_backend(world)(torch.device("cuda"))


def end_process(status: int) -> NoReturn:
    """End this process as `multiprocessing` does: flush everything, but do not finalize the interpreter.

    torch's threads (of gloo, the store, autograd) still run at that point, and occasionally one of them would abort a
    process that has finished its work.
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


_is_frozen_for_good = False
"""Whether `freeze_for_good` was called; to ask for the number of frozen objects counts them, which takes 60 ms."""


def freeze_for_good() -> None:
    """Keep all objects of now out of garbage collections, once: what a job of a sweep leaves is to be collected."""
    global _is_frozen_for_good
    if not (_is_frozen_for_good or gc.get_freeze_count()):
        gc.freeze()
    _is_frozen_for_good = True


_KINDS_OF_VALUES = Iterable, Mapping, Number, Sequence

_openmp_released = False
"""Whether the process from which this one was forked had released its threads of OpenMP."""


@contextmanager
def forking() -> Generator[None]:
    """Fork processes inside the block that share the memory of this one, and don't wait for its threads.

    A garbage collection writes to every object, so that each process would copy all memory that it shares with this
    one: what exists now is kept out of collections, in forked processes for good. What each would look up in the files
    of installed packages, such as Lightning's trainer the callbacks to add, is looked up here.
    """
    release_openmp()
    _do_first_time()
    entry_points = cache(registry.entry_points)
    entry_points(group="pytorch_lightning.callbacks_factory")
    others = _is_frozen_for_good or gc.get_freeze_count()  # kept out by whoever called: only all can be given back
    gc.freeze()
    try:
        with replaced(registry, "entry_points", entry_points):
            yield
    finally:
        if not others:
            gc.unfreeze()


def _do_first_time() -> None:
    """Do here what takes longer the first time, and what each rank would do for a first time.

    To log a value asks of twenty classes whether any of torchmetrics' is their base, and what takes batches or sizes
    apart asks whether values are mappings or sequences; abstract classes keep the answers. To read a tensor or to open
    a path imports modules, and so does Lightning's strategy. To make a group clears torch.compile's rules.
    """
    value = torch.zeros((), device="cpu")
    results: Any = of_lightning.ResultCollection(training=True)
    results.log("", "", value)
    _ = [issubclass(kind, Metric) for kind in (torch.Tensor, MethodType)]
    _ = [issubclass(kind, base) for kind in (int, list, tuple, torch.Tensor) for base in _KINDS_OF_VALUES]
    XLAAccelerator.is_available()
    of_torch.clear_compile_rules()
    pickle.loads(pickle.dumps(value))
    url_to_fs(os.devnull)
    importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook")


def release_openmp() -> None:
    """Release this thread's pool of OpenMP threads before a fork; it is made anew when it is needed again.

    Threads are not copied by a fork: a process whose parent has used them would wait for them for ever. Where OpenMP
    has no such function (before version 5.0), `prepare_forked` leaves a process one thread.
    """
    global _openmp_released
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    _openmp_released = pause is not None and pause(_OMP_PAUSE_HARD) == 0


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
    """Set up a process that was started by a strategy; called first in it.

    Args:
        timeout_s: the strategy's limit for waits.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if multiprocessing.current_process().__class__.__name__ == "ForkServerProcess":
        threading.Thread(target=_die_with, args=(parent,), name="evener-parent", daemon=True).start()
    else:
        die_with_parent(parent.pid)
    leave_in_time(min(timeout_s, FORKED_GRACE_S))
    if multiprocessing.current_process().__class__.__name__ != "SpawnProcess" and not _openmp_released:
        torch.set_num_threads(1)
