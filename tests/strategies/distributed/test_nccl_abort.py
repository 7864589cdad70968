"""A rank that waits in native code, as under NCCL: its watch thread names the rank at fault and ends the wait.

A fake stands for NCCL: nothing here shows that its `abort` returns, only that it is called, once, after the message.
"""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from evener.strategies.distributed import _heartbeat as watch
from evener.strategies.distributed import process_exit
from evener.strategies.distributed._heartbeat import RANK_FAILED, HeartbeatMonitor
from evener.strategies.distributed._stop import StopAgreement

WAIT_S = 20.0
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


def monitor(store: Any, rank: int, timeout_s: float) -> HeartbeatMonitor:
    return HeartbeatMonitor(store, rank, 2, StopAgreement(rank, 2, store), timeout_s)


def test_a_rank_that_failed_is_named_before_communication_is_aborted(nccl: FakeNCCL) -> None:
    store = LocalStore()
    waiting, failing = monitor(store, 0, 1000.0), monitor(store, 1, 1000.0)
    waiting.start()
    try:
        raise KeyError("only rank 1")
    except KeyError as exc:
        failing.explain(exc)
    assert nccl.aborted.wait(WAIT_S)
    waiting.end()
    assert len(nccl.events) == 2
    assert "rank 0 ends its communication: rank 1 failed with KeyError: 'only rank 1'" in nccl.events[0]


def test_a_rank_that_waits_for_a_hanging_one_names_it(nccl: FakeNCCL) -> None:
    store = LocalStore()
    waiting, hanging = monitor(store, 0, 0.4), monitor(store, 1, 1000.0)
    waiting.count_steps = lambda: 7
    hanging.start()
    waiting.start()
    assert nccl.aborted.wait(WAIT_S)  # the main thread waits here, as it would for its device
    waiting.end()
    hanging.end()
    assert nccl.events[0].startswith("rank 0 ends its communication: rank 1 is at step 0, test_nccl_abort.py:")
    assert nccl.events[1:] == ["aborted"]


def test_a_rank_that_goes_on_is_left_alone(nccl: FakeNCCL) -> None:
    store, steps = LocalStore(), iter(range(10**6))
    going, other = monitor(store, 0, 0.1), monitor(store, 1, 1000.0)
    going.count_steps = lambda: next(steps)
    other.start()
    going.start()
    time.sleep(0.6)
    going.end()
    other.end()
    assert nccl.events == []


def test_the_rank_at_fault_reports_its_own_error(nccl: FakeNCCL) -> None:
    store = LocalStore()
    failing = monitor(store, 0, 1000.0)
    failing.start()
    try:
        raise KeyError("its own")
    except KeyError as exc:
        failing.explain(exc)
    time.sleep(0.3)
    failing.end()
    assert nccl.events == []


def test_only_a_group_with_nccl_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    group = type("Group", (), {"_get_backend": lambda self, device: asked.append(device.type) or "backend"})()
    fake = SimpleNamespace(is_initialized=lambda: True, group=SimpleNamespace(WORLD=group))
    monkeypatch.setattr(process_exit, "dist", fake)
    fake.get_backend_config = lambda: "cpu:gloo,cuda:gloo"
    assert process_exit.nccl() is None
    fake.get_backend_config = lambda: "cpu:gloo,cuda:nccl"
    assert process_exit.nccl() == "backend"
    assert asked == ["cuda"]
    assert hasattr(dist.ProcessGroup, "_get_backend")
