"""Run one worker of the elastic agent: `python -m evener.trainer.launch.worker <resolved config>`."""

import faulthandler
import os
import signal
import sys

from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from ...strategies import ConfigError
from ...strategies.distributed.process_exit import die_with_parent, end_process, leave_in_time
from ..job.log_file import run_log
from ..job.run import run
from .environment import AGENT


@record
def work(config_file: str) -> None:
    """Run one rank; on failure the decorator stores the traceback for the agent."""
    cfg = OmegaConf.load(config_file)
    assert isinstance(cfg, DictConfig)
    leave_in_time(cfg.launcher.shutdown_timeout_s)
    with run_log(cfg.run_dir, int(os.environ["RANK"])):
        run(cfg)


def exit_status(config_file: str) -> int:
    """Run one rank.

    Returns:
        The exit status of a Python script that ends the same way.
    """
    try:
        work(config_file)
    except ConfigError:  # the agent's process prints the message once
        return 1
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return exc.code or 0
        sys.stderr.write(f"{exc.code}\n")  # sys.exit("why")
        return 1
    except BaseException as exc:  # noqa: BLE001  # printed, like an uncaught exception
        sys.excepthook(type(exc), exc, exc.__traceback__)
        return 128 + signal.SIGINT if isinstance(exc, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    faulthandler.enable()  # print Python's stack on a crash in native code
    die_with_parent(int(os.environ[AGENT]) if AGENT in os.environ else None)
    end_process(exit_status(sys.argv[1]))
