"""One process of a run, started by the elastic agent: `python -m evener.trainer.worker <resolved config>`."""

import faulthandler
import os
import sys

from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from ..strategies import ConfigError
from ..strategies.processes import die_with_parent, leave_in_time
from .launch import AGENT
from .logs import run_log
from .run import run


@record
def work(config_file: str) -> None:
    """Run one rank; the decorator leaves the traceback of a failure where the agent finds it."""
    cfg = OmegaConf.load(config_file)
    assert isinstance(cfg, DictConfig)
    leave_in_time(cfg.launcher.shutdown_timeout_s)
    with run_log(cfg.run_dir, int(os.environ["RANK"])):
        run(cfg)


if __name__ == "__main__":
    faulthandler.enable()  # a crash in native code says where Python was
    die_with_parent(int(os.environ[AGENT]) if AGENT in os.environ else None)
    try:
        work(sys.argv[1])
    except ConfigError:  # the agent's process prints the sentence, once
        sys.exit(1)
