"""A store whose host is frozen: whoever reads from it fails in time, with the reason."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from lightning_fabric.plugins.environments import LightningEnvironment
from lightning_fabric.utilities.rank_zero import rank_zero_only
from torch.distributed import DistNetworkError

from evener.strategies.distributed import store as store_file
from evener.strategies.distributed.store import RankError, another_connection, base_store, wait_for

HOST = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(100)
"""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Generator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # `set_global_rank` sets it for the whole process
    monkeypatch.setattr(store_file, "_own", None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", process.stdout.readline().strip())
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def rank_1() -> LightningEnvironment:
    environment = LightningEnvironment()
    environment.set_world_size(2)
    environment.set_global_rank(1)
    return environment


def has_stopped(thread: Path) -> bool:
    """Whether a thread has stopped, or has ended meanwhile."""
    try:
        return bool(re.search(r"\) [Tt] ", thread.read_text()))
    except OSError:
        return True


def freeze(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not all(map(has_stopped, Path(f"/proc/{pid}/task").glob("*/stat"))):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_read_from_a_frozen_host_fails(host: subprocess.Popen[str]) -> None:
    store = base_store(rank_1(), 2.0)
    again = another_connection(store)
    store.set("key", "value")
    assert wait_for(store, ["key"], 60.0)
    freeze(host.pid)
    for read in (lambda: store.check(["key"]), lambda: again.get("key")):
        with pytest.raises(DistNetworkError, match="Socket Timeout"):
            read()
    told = r"The store at 127.0.0.1:\d+ has not answered for 2 s: .*\(rank 0\) is frozen"
    with pytest.raises(RankError, match=told):
        wait_for(store, ["key", "none"], 60)
