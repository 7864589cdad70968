"""A frozen worker does not hold up the end of a run that has failed: torch's agent waits 30 s for it to react."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import PContext
from torch.multiprocessing.spawn import ProcessContext

from evener.strategies.distributed.process_exit import is_frozen
from evener.trainer.launch._elastic import Workers


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


def test_a_frozen_worker_is_killed_before_forked_ones_are_awaited(frozen: BaseProcess) -> None:
    context: Any = SimpleNamespace(processes=[frozen])
    with Workers(60).started_by_agent():
        ProcessContext._join_procs_with_timeout(context, 60)
    assert frozen.exitcode == -signal.SIGKILL


def test_a_frozen_worker_is_killed_before_started_ones_are_asked_to_end(frozen: BaseProcess) -> None:
    seen: list[int | None] = []

    def close(death_sig: Any, timeout: int) -> None:
        frozen.join(60)
        seen.append(frozen.exitcode)

    context: Any = SimpleNamespace(
        pids=lambda: {0: frozen.pid}, _close=close, _tail_logs=[], filtered_stdout=None, filtered_stderr=None
    )
    with Workers(60).started_by_agent():
        PContext.close(context)
    assert seen == [-signal.SIGKILL]
