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


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_frozen_worker_is_killed(frozen: BaseProcess, max_restarts: int, tmp_path: Path) -> None:
    # where all may be started again, the others waited for it as long as for a network, strategy.timeout_s
    launcher = {"monitor_interval_s": 0.01, "shutdown_timeout_s": 60, "max_restarts": max_restarts}
    workers = Workers(OmegaConf.create({"launcher": launcher}), 1, tmp_path, forks=True)
    workers.processes.append(frozen)
    if not max_restarts:
        workers.end(signal.SIGTERM, 60)
    assert workers.join() == 0
    assert frozen.exitcode == -signal.SIGKILL
