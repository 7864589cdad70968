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
from ...strategies.distributed.process_exit import ASK_TO_STOP, die_with_parent, end_process, leave_in_time
from ...strategies.distributed.store import leave_store
from ..job.failure import Failure
from ..job.result import WorkerError
from ..job.run import Run
from ..job.signals import Interrupted, stops_at_once
from .environment import AGENT, FAILURE_FILE, RUNNING_FILE, STOPPED_FILE


def work(cfg: DictConfig, scratch: Path) -> None:
    """Run one rank; the first that fails leaves its reason for the command, which prints the last attempt's.

    Args:
        cfg: the resolved configuration.
        scratch: the directory that the command reads.
    """
    leave_in_time(cfg.launcher.shutdown_timeout_s)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def tell(failure: Failure) -> None:
        with replacing(scratch / FAILURE_FILE.format(attempt)) as file:
            file.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        if attempt < int(os.environ["TORCHELASTIC_MAX_RESTARTS"]):
            sys.stderr.write(f"rank {failure.rank} failed: {failure.short}\n")

    Run(cfg, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])).execute(tell)


def exit_status(cfg: DictConfig, scratch: Path) -> int:
    """Run one rank.

    Returns:
        The exit status of a Python script that ends the same way; not 0 if the user's code has ended this rank.
    """
    running, hosts = scratch / RUNNING_FILE, os.environ["RANK"] == "0"
    with stops_at_once():
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_STOP)  # blocked while it was started
            if hosts:
                running.touch()
            work(cfg, scratch)
        except Interrupted as exc:
            if hosts and running.exists():
                running.write_text(str(exc.signum))
                running.rename(scratch / STOPPED_FILE)
            return 128 + exc.signum
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except Exception as exc:  # noqa: BLE001  # reported already
            return exc.status if isinstance(exc, WorkerError) else 1
        return 0


def begin() -> None:
    """Print Python's stack on a crash in native code, and end with the command."""
    faulthandler.enable()
    die_with_parent(int(os.environ[AGENT]) if AGENT in os.environ else None)


def run_forked(cfg: DictConfig, scratch: Path, variables: dict[str, str]) -> None:
    """Run one rank in a process that was forked from the command, and has all of it imported.

    Args:
        cfg: the resolved configuration.
        scratch: the directory that the command reads.
        variables: the rank's environment.

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
    numpy.random.seed()  # without a seed each rank draws its own numbers
    status = exit_status(cfg, scratch)
    leave_store()
    if status != 0:
        sys.exit(status)


if __name__ == "__main__":
    begin()
    loaded = OmegaConf.load(sys.argv[1])
    assert isinstance(loaded, DictConfig)
    end_process(exit_status(loaded, Path(sys.argv[1]).parent))
