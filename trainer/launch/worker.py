"""Run one worker of a command, in a process that is forked from it or that starts Python anew."""

import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.context import ForkContext, SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType

import numpy
import torch
from omegaconf import DictConfig

from ...strategies.distributed import survivors
from ...strategies.distributed.process_exit import ASK_TO_STOP, die_with_starter, end_process, forking, leave_in_time
from ...strategies.distributed.store import leave_store
from ...strategies.distributed.survivors import Board, Survivor
from ..job.log_file import Interrupted, graceful_stop
from ..job.result import Result, WorkerError
from ..job.run import Run

ENDED_FILE = "ended{}"
"""The file of an attempt that is there once a rank has ended in order, and has told why."""


@contextmanager
def starting(forks: bool) -> Generator[ForkContext | SpawnContext]:
    """Start processes inside the block by what it yields: forked from this one, or with Python anew.

    A new Python does not run the user's script, whose classes can't be named in a configuration.
    """
    script = sys.modules["__main__"]
    try:
        if forks:
            with forking():
                yield multiprocessing.get_context("fork")
        else:
            sys.modules["__main__"] = ModuleType("__main__")
            yield multiprocessing.get_context("spawn")
    finally:
        sys.modules["__main__"] = script


def begin() -> None:
    """Make a process that `starting` has started independent of the command's log and signals, but end with it."""
    for signum in ASK_TO_STOP:  # the command passes signals on
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    faulthandler.enable()  # Python's stack on a crash in native code
    die_with_starter()
    logging.getLogger().handlers.clear()  # the command's
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    numpy.random.seed()  # without a seed each process draws its own numbers


def run(cfg: DictConfig, folder: Path, variables: dict[str, str], board: Board | None) -> None:
    """Run one rank in a process of its own, which ends with the rank's status."""
    os.environ.update(variables)
    begin()
    for signum in ASK_TO_STOP:  # they are blocked until it stops in order, and may come when it has ended
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda number, frame: None)
    if board is not None:
        survivors.own = Survivor(board, int(os.environ["RANK"]))
    status = exit_status(cfg, folder)
    if isinstance(multiprocessing.current_process(), SpawnProcess):
        end_process(status)
    leave_store()
    sys.exit(status)


def exit_status(cfg: DictConfig, folder: Path) -> int:
    """Run one rank; return the status of a script that ends the same way, not 0 if the user's code has ended it."""
    rank = int(os.environ["RANK"])
    tells = True
    with graceful_stop():
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_STOP)  # blocked while it was started
            leave_in_time(cfg.launcher.shutdown_timeout_s)
            Run(cfg, rank, int(os.environ["WORLD_SIZE"])).execute()
        except Interrupted as exc:
            tells = exc.begun or exc.told  # else it had no log yet: the command tells it
            return 128 + exc.signum
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except Exception as exc:  # noqa: BLE001  # reported already
            if Result.of_failure(cfg.run_dir) is None:  # the disk is full
                traceback.print_exc()
            return exc.status if isinstance(exc, WorkerError) else 1
        finally:
            if tells:
                (folder / ENDED_FILE.format(rank)).touch()
        return 0
