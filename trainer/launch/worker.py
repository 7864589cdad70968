"""Run one worker of the elastic agent: `python -m evener.trainer.launch.worker <resolved config>`."""

import faulthandler
import os
import signal
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from ...strategies.distributed.process_exit import die_with_parent, end_process, leave_in_time
from ..job.failure import Failure, report
from ..job.log_file import run_log
from ..job.run import run
from ..job.signals import Interrupted
from .environment import AGENT, STOPPED_FILE


@record
def work(config_file: str) -> None:
    """Run one rank; on failure the decorator stores the traceback for the agent, whose process prints the last one."""
    cfg = OmegaConf.load(config_file)
    assert isinstance(cfg, DictConfig)
    leave_in_time(cfg.launcher.shutdown_timeout_s)
    rank = int(os.environ["RANK"])
    with run_log(cfg.run_dir, rank):
        try:
            run(cfg)
        except Exception as exc:
            failure = Failure.of(exc, rank)
            if report(cfg, failure, int(os.environ["WORLD_SIZE"])) and is_restarted():
                sys.stderr.write(f"rank {rank} failed: {failure.short}\n")
            raise


def is_restarted() -> bool:
    """Whether the agent restarts the workers when this one has failed."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(os.environ["TORCHELASTIC_MAX_RESTARTS"])


def exit_status(config_file: str) -> int:
    """Run one rank.

    Returns:
        The exit status of a Python script that ends the same way.
    """
    try:
        work(config_file)
    except SystemExit as exc:
        if isinstance(exc, Interrupted) and os.environ["RANK"] == "0":
            Path(config_file).with_name(STOPPED_FILE).touch()
        if exc.code is None or isinstance(exc.code, int):
            return exc.code or 0
        sys.stderr.write(f"{exc.code}\n")  # sys.exit("why")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # noqa: BLE001  # reported already
        return 1
    return 0


if __name__ == "__main__":
    faulthandler.enable()  # print Python's stack on a crash in native code
    die_with_parent(int(os.environ[AGENT]) if AGENT in os.environ else None)
    end_process(exit_status(sys.argv[1]))
