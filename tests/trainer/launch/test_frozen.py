"""A frozen worker does not hold up the end of a run that has failed: torch's agent waits 30 s for it to react."""

import signal
import subprocess
import time
from types import SimpleNamespace
from typing import Any

from torch.distributed.elastic.multiprocessing import PContext

from evener.strategies.distributed.process_exit import is_frozen
from evener.trainer.launch._elastic import frozen_workers_killed


def test_frozen_workers_are_killed_before_the_others_are_asked() -> None:
    frozen, running = (subprocess.Popen(["sleep", "100"]) for _ in range(2))
    seen: list[Any] = []

    def close(death_sig: Any, timeout: int) -> None:
        seen.append((frozen.wait(timeout=60), running.poll()))

    try:
        frozen.send_signal(signal.SIGSTOP)
        while not is_frozen(frozen.pid):
            time.sleep(0.01)
        context: Any = SimpleNamespace(pids=lambda: {0: frozen.pid, 1: running.pid}, _close=close, _tail_logs=[])
        before = PContext.close
        with frozen_workers_killed():
            PContext.close(context)
        assert seen == [(-signal.SIGKILL, None)]
        assert PContext.close is before
    finally:
        for process in (frozen, running):
            process.kill()
            process.wait()
