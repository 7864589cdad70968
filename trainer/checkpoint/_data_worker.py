"""Run data workers whose random numbers belong to samples, and that outlive signals, but not their rank."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.queues import Queue
from multiprocessing.util import Finalize
from typing import Any

from torch.utils.data import DataLoader

from ...strategies.core import rng
from ...strategies.core.patching import replaced
from ...strategies.distributed.process_exit import ASK_TO_STOP, die_with_starter, fork


def start_workers(loader: DataLoader[Any], get_iterator: Callable[[], Any]) -> Any:
    """Return what `get_iterator` makes of a loader with workers."""
    if (loader.multiprocessing_context or multiprocessing).get_start_method() == "forkserver":
        forkserver.ensure_running()  # with signals as they are: whatever it starts inherits them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_STOP)  # until a worker has handlers of its own
    collects, others = gc.isenabled(), multiprocessing.active_children()
    _watch_until_end_of(os.getpid())
    gc.disable()  # until a worker has set apart what is not its own
    try:
        begin = partial(_begin, threading.current_thread() is threading.main_thread(), collects, loader.worker_init_fn)
        with replaced(loader, "worker_init_fn", begin), replaced(os, "fork", fork):
            iterator: Any = get_iterator()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if collects:
            gc.enable()
        started: set[Any] = set(multiprocessing.active_children()).difference(others)
        for process in started:  # also where their start has failed
            process._popen.terminate = process._popen.kill  # how torch and Python end one that hangs
    if workers := getattr(iterator, "_workers", None):  # whole until its end: garbage is collected in any order
        weakref.finalize(iterator, id, (workers, iterator._index_queues)).atexit = False
    return iterator


@cache
def _watch_until_end_of(_: int) -> None:
    """Have torch's handler fail this process for workers that end, but not for those that Python kills at its end."""
    Finalize(None, signal.signal, (signal.SIGCHLD, signal.SIG_DFL), exitpriority=0)


class _SeededList(list[Any]):
    """A batch's indices, before each of which the random streams are seeded for its sample."""

    entropy: tuple[int, ...]

    def __iter__(self) -> Iterator[Any]:
        seed, first = self.entropy
        for place, index in enumerate(super().__iter__(), first):
            rng.seed_sample(seed, place)
            yield index


@dataclass
class Seeded:
    """Indices sent to a worker: unpickling them seeds the worker for the batch, or for each of its samples."""

    entropy: tuple[int, ...]
    indices: Any
    each: bool

    def __reduce__(self) -> Any:
        return _arrive, (self.entropy, self.indices, self.each)


def _begin(by_main_thread: bool, collects: bool, then: Any, worker_id: int) -> None:
    """Begin in a data worker, which the rank's main thread may have started: outlive signals, but not the rank.

    Garbage of the rank is left alone: a process group would wait for its threads, which are not here.

    SLURM, systemd and terminals send their signals to all processes of a run. A worker that ended at once would take
    its rank along before that has saved. torch's own watchdog looks for the rank between two batches only. The loader's
    own `worker_init_fn` is called `then`.
    """
    for signum in ASK_TO_STOP:
        # a function, not SIG_IGN, which programs that the dataset starts would inherit
        signal.signal(signum, lambda number, frame: None)
    signal.set_wakeup_fd(-1)  # the rank's, which would take this process's signals for its own
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_STOP)
    gc.freeze()
    if collects:
        gc.enable()
    die_with_starter(by_main_thread)
    if then is not None:
        then(worker_id)


def _arrive(entropy: tuple[int, ...], indices: Any, each: bool) -> Any:
    rng.seed_all(*entropy)
    if each:
        indices = _SeededList(indices)
        indices.entropy = entropy
    feeder: Any = Queue
    feeder._on_queue_feeder_error = staticmethod(_end)  # in this worker, before its first put
    return indices


def _end(exc: Exception, _: object) -> None:
    """End a worker whose batch can't be pickled: Python drops such an object, and training would hang."""
    traceback.print_exception(exc)
    sys.stderr.write(
        "A DataLoader worker can't pickle its batch (see above). Return tensors, numbers, strings and containers of "
        "these from the dataset and from collate_fn, or set num_workers=0.\n"
    )
    sys.stderr.flush()
    os._exit(1)  # a thread can't end its process in another way
