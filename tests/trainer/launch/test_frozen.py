"""A frozen worker holds up neither the end of a run that has failed nor one that may be started again."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from evener.strategies.distributed.process_exit import is_frozen
from evener.trainer.launch.launcher import Workers


@pytest.fixture
def frozen() -> Iterator[BaseProcess]:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
    process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    while not is_frozen(process.pid):
        time.sleep(0.01)
    yield process
    process.kill()
    process.join()


def test_a_frozen_worker_does_not_hold_up_the_end(frozen: BaseProcess, tmp_path: Path) -> None:
    options = OmegaConf.create({"launcher": {"monitor_interval_s": 0.01, "shutdown_timeout_s": 60, "max_restarts": 0}})
    workers = Workers(options, 1, tmp_path, forks=True)
    workers.processes.append(frozen)
    workers.end(signal.SIGTERM, 60)
    assert workers.join() == 0
    assert frozen.exitcode == -signal.SIGKILL


def test_a_frozen_worker_is_killed_where_all_may_be_started_again(frozen: BaseProcess, tmp_path: Path) -> None:
    # The others waited for it as long as for a network, strategy.timeout_s.
    options = OmegaConf.create({"launcher": {"monitor_interval_s": 0.01, "shutdown_timeout_s": 60, "max_restarts": 1}})
    workers = Workers(options, 1, tmp_path, forks=True)
    workers.processes.append(frozen)
    assert workers.join() == 0
    assert frozen.exitcode == -signal.SIGKILL
