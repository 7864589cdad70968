"""The thread that watches: ranks agree on the step to stop at, and a rank or a store that hangs is named in time."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric.plugins.environments import LightningEnvironment
from lightning_fabric.utilities.rank_zero import rank_zero_only
from torch.distributed import DistNetworkError, HashStore

from evener.strategies.distributed import _watch as watch
from evener.strategies.distributed import store as store_file
from evener.strategies.distributed._watch import HeartbeatMonitor, StopAgreement
from evener.strategies.distributed.store import RankError, another_connection, base_store, wait_for

WAIT_S = 60.0
"""Most seconds for what takes tenths of one."""


def run_in_lockstep(asked: int, asked_at: int, heard_at: tuple[int, ...]) -> list[int]:
    """Ranks in a row begin each step only after all have begun the one before, as the gradients' reduction has it.

    Args:
        asked: the rank that gets the signal.
        asked_at: before which step.
        heard_at: before which step each rank's thread listens for the first time.

    Returns:
        The step at which each rank stopped.
    """
    store = HashStore()
    ranks = [StopAgreement(rank, len(heard_at), store) for rank in range(len(heard_at))]
    stopped = [-1] * len(ranks)
    for step in range(50):
        for number, rank in enumerate(ranks):
            if stopped[number] >= 0:
                continue
            if number == asked and step >= asked_at:
                rank.signal = 15
            if step >= heard_at[number]:
                rank.listen(store)
            if rank.signal is not None and rank.due(step):
                stopped[number] = step
    return stopped


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_all_ranks_stop_at_one_step(asked: int) -> None:
    for heard_at in itertools.product(range(5), repeat=3):
        stopped = run_in_lockstep(asked, 2, heard_at)
        assert len(set(stopped)) == 1
        assert 2 <= stopped[0] <= max(*heard_at, 2) + 3


def test_a_rank_synchronizes_its_devices_before_it_counts_as_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    store, seen = HashStore(), dict[str, bool]()
    monkeypatch.setattr(
        torch.accelerator, "synchronize",
        lambda device: seen.update({str(device): store.check(["stop/training/armed/0"])}),
    )  # fmt: skip
    rank = StopAgreement(0, 2, store, devices=[torch.device(name) for name in ("cuda:0", "cpu", "cuda:1")])
    rank.due(3)
    assert seen == {"cuda:0": False, "cuda:1": False}
    assert store.check(["stop/training/armed/0"])


def test_a_rank_that_does_not_come_is_named() -> None:
    alone = StopAgreement(0, 2, HashStore(), timeout_s=0.1)
    with pytest.raises(RankError, match=r"should_stop\) and waited 0\.1 s for rank 1"):
        alone.ends(wished=True, step=3)


class LocalStore(HashStore):
    """A store that can be cloned, as those that ranks share can."""

    def clone(self) -> Any:
        return self


def monitor(store: Any, rank: int, timeout_s: float = 1000.0) -> HeartbeatMonitor:
    return HeartbeatMonitor(StopAgreement(rank, 2, store, timeout_s))


def pass_beats(one: HeartbeatMonitor, num: int) -> None:
    last, ends = one.beat.num + num, time.monotonic() + WAIT_S
    while one.beat.num < last:
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_a_rank_that_waits_in_native_code_for_a_hanging_one_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told, has_told = list[str](), threading.Event()
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    monkeypatch.setattr(watch, "waits_natively", lambda: True)  # as under NCCL
    monkeypatch.setattr(watch._log, "error", lambda text, *args: (told.append(text % args), has_told.set()))
    store, steps = LocalStore(), iter(range(10**6))
    waiting, hanging = monitor(store, 0, 1.0), monitor(store, 1)
    hanging.start()
    waiting.count_steps = lambda: next(steps)
    waiting.start()
    pass_beats(waiting, 60)  # of 0.02 s, and it counts as stuck after 0.95 s
    assert told == []
    waiting.count_steps = lambda: 7
    assert has_told.wait(WAIT_S)  # the main thread waits here, as it would for its device
    waiting.end()
    hanging.end()
    assert len(told) == 1
    assert told[0].startswith("rank 0 waits at test_watch.py:")
    assert ": rank 1 is at step 0, test_watch.py:" in told[0]


class Big:
    """Something that a step holds, such as its activations."""


def test_signs_of_life_keep_nothing_of_a_step_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    signs = monitor(LocalStore(), 0)

    def step() -> weakref.ref[Big]:
        big = Big()
        pass_beats(signs, 2)
        assert "in pass_beats" in signs.beat.place
        return weakref.ref(big)

    signs.start()
    alive = [step()() is not None for _ in range(5)]
    signs.end()
    assert alive == [False] * 5


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
