"""A rank that waits in native code, as under NCCL: its watch thread names the rank at fault and ends the wait.

A fake stands for NCCL: nothing here shows that its `abort` returns, only that it is called, once, after the message.
"""

import threading
import time
import weakref
from typing import Any

import pytest
from torch.distributed import HashStore

from evener.strategies.distributed import _heartbeat as watch
from evener.strategies.distributed._heartbeat import RANK_FAILED, HeartbeatMonitor
from evener.strategies.distributed._stop import StopAgreement

WAIT_S = 60.0
"""Most seconds for what takes tenths of one."""


class LocalStore(HashStore):
    """A store that can be cloned, as those that ranks share can."""

    def clone(self) -> Any:
        return self


class FakeNCCL:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.events.append("aborted")
        self.aborted.set()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Any:
    backend = FakeNCCL()
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    monkeypatch.setattr(watch, "nccl", lambda: backend)
    monkeypatch.setattr(watch._log, "error", lambda text, *args: backend.events.append(text % args))
    yield backend
    RANK_FAILED.clear()


def monitor(store: Any, rank: int, timeout_s: float = 1000.0) -> HeartbeatMonitor:
    return HeartbeatMonitor(store, rank, 2, StopAgreement(rank, 2, store), timeout_s)


def pass_beats(one: HeartbeatMonitor, num: int) -> None:
    last, ends = one.beat.num + num, time.monotonic() + WAIT_S
    while one.beat.num < last:
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_a_rank_that_failed_is_named_by_the_other_which_aborts_and_not_by_itself(nccl: FakeNCCL) -> None:
    store = LocalStore()
    failing, waiting = monitor(store, 1), monitor(store, 0)
    failing.start()
    try:
        raise KeyError("only rank 1")
    except KeyError as exc:
        failing.explain(exc)
    pass_beats(failing, 5)
    assert nccl.events == []
    waiting.start()
    assert nccl.aborted.wait(WAIT_S)
    waiting.end()
    failing.end()
    assert len(nccl.events) == 2
    assert "rank 0 ends its communication: rank 1 failed with KeyError: 'only rank 1'" in nccl.events[0]


def test_a_rank_that_waits_for_a_hanging_one_names_it_and_one_that_goes_on_is_left_alone(nccl: FakeNCCL) -> None:
    store, steps = LocalStore(), iter(range(10**6))
    waiting, hanging = monitor(store, 0, 1.0), monitor(store, 1)
    hanging.start()
    waiting.count_steps = lambda: next(steps)
    waiting.start()
    pass_beats(waiting, 60)  # of 0.02 s, and it counts as stuck after 0.95 s
    assert nccl.events == []
    waiting.count_steps = lambda: 7
    assert nccl.aborted.wait(WAIT_S)  # the main thread waits here, as it would for its device
    waiting.end()
    hanging.end()
    assert nccl.events[0].startswith("rank 0 ends its communication: rank 1 is at step 0, test_nccl_abort.py:")
    assert nccl.events[1:] == ["aborted"]


class Big:
    """Something that a step holds, such as its activations."""


def test_signs_of_life_keep_nothing_of_a_step_alive(nccl: FakeNCCL) -> None:
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
