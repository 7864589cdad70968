"""Run one worker of a command, forked from it or as `python -m evener.trainer.launch.worker`."""

import faulthandler
import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import numpy
import torch
from omegaconf import DictConfig, OmegaConf

from ...strategies.core.files import replacing
from ...strategies.distributed import survivors
from ...strategies.distributed.process_exit import ASK_TO_STOP, die_with_parent, end_process, leave_in_time
from ...strategies.distributed.store import leave_store
from ...strategies.distributed.survivors import Board, Survivor
from ..job.log_file import Failure
from ..job.result import WorkerError
from ..job.run import Run
from ..job.signals import Interrupted, stops_at_once
from .environment import ENDED_FILE, FAILURE_FILE, PARENT


def work(cfg: DictConfig, folder: Path) -> None:
    """Run one rank; the first that fails leaves its reason for the command, which prints the last attempt's."""
    leave_in_time(cfg.launcher.shutdown_timeout_s)
    is_last = os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ["TORCHELASTIC_MAX_RESTARTS"]

    def tell(failure: Failure) -> None:
        with replacing(folder / FAILURE_FILE) as file:
            file.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        if not is_last:
            sys.stderr.write(f"rank {failure.rank} failed: {failure.told}\n")

    Run(cfg, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])).execute(tell)


def exit_status(cfg: DictConfig, folder: Path) -> int:
    """Run one rank.

    Returns:
        The exit status of a Python script that ends the same way; not 0 if the user's code has ended this rank.
    """
    rank = os.environ["RANK"]
    tells = True
    with stops_at_once():
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_STOP)  # blocked while it was started
            work(cfg, folder)
        except Interrupted as exc:
            tells = exc.begun or exc.told  # else it had no log yet: the command tells it
            return 128 + exc.signum
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except Exception as exc:  # noqa: BLE001  # reported already
            return exc.status if isinstance(exc, WorkerError) else 1
        finally:
            if tells:
                (folder / ENDED_FILE.format(rank)).touch()
        return 0


def begin() -> None:
    """Print Python's stack on a crash in native code, and end with the command."""
    faulthandler.enable()
    die_with_parent(int(os.environ[PARENT]) if PARENT in os.environ else None)


def run_forked(cfg: DictConfig, folder: Path, variables: dict[str, str], board: Board | None) -> None:
    """Run one rank in a process that was forked from the command, and has all of it imported.

    Raises:
        SystemExit: the rank failed; its status.
    """
    os.environ.update(variables)
    for signum in ASK_TO_STOP:  # the command passes signals on
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    begin()
    logging.getLogger().handlers.clear()  # the command's; a rank opens its own log
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if board is not None:
        survivors.own = Survivor(board, int(os.environ["RANK"]))
    numpy.random.seed()  # without a seed each rank draws its own numbers
    status = exit_status(cfg, folder)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler fails for data workers that end with their rank
    leave_store()
    if status != 0:
        sys.exit(status)


if __name__ == "__main__":
    begin()
    loaded = OmegaConf.load(sys.argv[1])
    assert isinstance(loaded, DictConfig)
    end_process(exit_status(loaded, Path(sys.argv[2])))
