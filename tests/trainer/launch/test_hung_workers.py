"""A data worker that hangs ends with its run, and is named."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from launching import GONE_S, Run, ends, failure_of, running

WORDS = ("module._target_=launched.Hangs", "strategy.timeout_s=6")


def pid_of_worker(run: Run) -> int:
    """Wait until the worker hangs."""
    path, since_s = Path(f"{run.record}.worker"), time.monotonic()
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < since_s + GONE_S, run.output.read_text()
        time.sleep(0.05)
    return int(path.read_text())


def verify_gone(pid: int) -> None:
    since_s = time.monotonic()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < since_s + GONE_S, "the worker is alive"
        time.sleep(0.05)


@pytest.mark.long
def test_the_rank_whose_data_worker_hangs_is_named(tmp_path: Path) -> None:
    with running(tmp_path, *WORDS) as run:
        pid = pid_of_worker(run)
        assert ends(run, time.monotonic()) == 1
        verify_gone(pid)
        _, reason = failure_of(run)
        assert re.search(r"rank 1 is at step 3, .* waiting for a data worker\)", reason), reason


@pytest.mark.long
def test_a_data_worker_that_hangs_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    with running(tmp_path, *WORDS) as run:
        pid = pid_of_worker(run)
        os.kill(run.process.pid, signal.SIGKILL)
        assert ends(run, time.monotonic()) == -signal.SIGKILL
        verify_gone(pid)
