"""One process of a run, started by the elastic agent: `python -m evener.trainer.worker <resolved config>`."""

import ctypes
import os
import signal
import sys

from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from ..strategies import ConfigError
from .launch import AGENT
from .logs import run_log
from .run import run

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel (Linux) to end this process when its parent does, so that no worker outlives a killed agent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ.get(AGENT, os.getppid())):
            os.kill(os.getpid(), signal.SIGKILL)  # it ended before it was asked


@record
def work(config_file: str) -> None:
    """Run one rank; the decorator leaves the traceback of a failure where the agent finds it."""
    cfg = OmegaConf.load(config_file)
    assert isinstance(cfg, DictConfig)
    with run_log(cfg.run_dir, int(os.environ["RANK"])):
        run(cfg)


if __name__ == "__main__":
    die_with_parent()
    try:
        work(sys.argv[1])
    except ConfigError:  # the agent's process prints the sentence, once
        sys.exit(1)
