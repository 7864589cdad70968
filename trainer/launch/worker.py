"""Run one worker of the elastic agent, forked from the command or as `python -m evener.trainer.launch.worker`."""

import faulthandler
import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from ...strategies import ConfigError
from ...strategies.core.files import replacing
from ...strategies.distributed.process_exit import die_with_parent, end_process, leave_in_time
from ...strategies.distributed.store import leave_store
from ..job.failure import Failure, is_stop, report
from ..job.log_file import run_log
from ..job.run import run
from ..job.signals import Interrupted
from .environment import AGENT, FAILURE_FILE, STOPPED_FILE


def work(cfg: DictConfig, scratch: Path) -> None:
    """Run one rank; the first that fails leaves its reason for the agent's process, which prints the last attempt's.

    Args:
        cfg: the resolved configuration.
        scratch: the directory that the agent's process reads.
    """
    leave_in_time(cfg.launcher.shutdown_timeout_s)
    rank = int(os.environ["RANK"])
    with run_log(cfg.run_dir, rank):
        try:
            run(cfg)
        except BaseException as exc:
            if is_stop(exc):
                raise
            failure = Failure.of(exc, rank)
            if report(cfg, failure, int(os.environ["WORLD_SIZE"])):
                tell(scratch, failure, isinstance(exc, (ConfigError, MisconfigurationException)))
                if is_restarted():
                    sys.stderr.write(f"rank {rank} failed: {failure.short}\n")
            raise


def tell(scratch: Path, failure: Failure, refused: bool) -> None:
    """Leave the first failure of this attempt for the agent's process."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    with replacing(scratch / FAILURE_FILE.format(attempt)) as file:
        file.write_text(json.dumps({**asdict(failure), "refused": refused}), encoding="utf-8")


def is_restarted() -> bool:
    """Whether the agent restarts the workers when this one has failed."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(os.environ["TORCHELASTIC_MAX_RESTARTS"])


def exit_status(cfg: DictConfig, scratch: Path) -> int:
    """Run one rank.

    Returns:
        The exit status of a Python script that ends the same way; not 0 if the user's code has ended this rank.
    """
    try:
        work(cfg, scratch)
    except SystemExit as exc:
        if isinstance(exc, Interrupted) and os.environ["RANK"] == "0":
            (scratch / STOPPED_FILE).touch()
        return exc.code if isinstance(exc.code, int) and exc.code else 1  # the other ranks go on: it has failed
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # noqa: BLE001  # reported already
        return 1
    return 0


def begin() -> None:
    """Print Python's stack on a crash in native code, and end with the agent."""
    faulthandler.enable()
    die_with_parent(int(os.environ[AGENT]) if AGENT in os.environ else None)


def run_forked(cfg: DictConfig, scratch: Path, handlers: dict[int, Any]) -> None:
    """Run one rank in a process that was forked from the command, and has all of it imported.

    Args:
        cfg: the resolved configuration.
        scratch: the directory that the agent's process reads.
        handlers: of signals, to be restored; those of the agent are not for its workers.

    Raises:
        SystemExit: the rank failed; its status.
    """
    for number, handler in handlers.items():
        signal.signal(number, handler)
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
