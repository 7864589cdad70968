"""The thread that watches: ranks agree on the step to stop at, and one that waits in native code names who hangs."""

import itertools
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from evener.strategies.distributed import _watch as watch
from evener.strategies.distributed._watch import HeartbeatMonitor, StopAgreement
from evener.strategies.distributed.store import RankError

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
