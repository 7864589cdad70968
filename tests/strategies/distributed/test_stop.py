"""Ranks agree on the step to stop at: simulated in lockstep, with every pace at which threads may hear of it."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from evener.strategies.distributed._stop import StopAgreement
from evener.strategies.distributed.store import RankError


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
            if number == asked and step >= asked_at and not rank.armed:
                rank.request(15)
            if step >= heard_at[number]:
                rank.listen(store)
            if rank.armed and rank.due(step):
                stopped[number] = step
    return stopped


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_all_ranks_stop_at_one_step(asked: int) -> None:
    for heard_at in itertools.product(range(5), repeat=3):
        stopped = run_in_lockstep(asked, 2, heard_at)
        assert len(set(stopped)) == 1
        assert 2 <= stopped[0] <= max(*heard_at, 2) + 3


def test_nothing_is_asked_of_the_store_before_a_request() -> None:
    class Untouched(HashStore):
        def check(self, keys: list[str]) -> bool:
            pytest.fail(f"asked for {keys}")

        def set(self, key: str, value: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            pytest.fail(f"set {key}")

    rank = StopAgreement(0, 2, Untouched())
    assert not rank.agreed(received=False, step=3)


def test_a_single_rank_stops_at_the_next_step() -> None:
    alone = StopAgreement(0, 1, HashStore())
    alone.request(15)
    assert alone.armed
    assert not alone.due(7)
    assert alone.due(8)


def test_a_rank_synchronizes_its_devices_before_it_counts_as_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Recording(HashStore):
        def set(self, key: str, value: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            seen.append(key)
            super().set(key, value)

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: seen.append(f"synchronize {device}"))
    devices = [torch.device("cuda:0"), torch.device("cpu"), torch.device("cuda:1")]
    rank = StopAgreement(0, 2, Recording(), devices=devices)
    rank.request(15)
    rank.due(3)
    assert seen[:3] == ["synchronize cuda:0", "synchronize cuda:1", "stop/training/armed/0"]


def end_together(wished_at: tuple[int, ...]) -> list[int]:
    """Train ranks that begin each step together, each with a thread that listens, as a heartbeat's does.

    Args:
        wished_at: the step after which each rank wishes to end.

    Returns:
        The step after which each rank has ended.
    """
    store, num_ranks = HashStore(), len(wished_at)
    gradients = threading.Barrier(num_ranks, timeout=20)

    def train(rank: int) -> int:
        agreement, over = StopAgreement(rank, num_ranks, store, 20), threading.Event()

        def listen() -> None:
            while not over.wait(0.001):
                agreement.listen(store)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            for step in range(1, 10000):
                gradients.wait()
                if agreement.ends(step == wished_at[rank], step):
                    return step
        finally:
            over.set()
            thread.join()
        return -1

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(train, range(num_ranks)))


@pytest.mark.parametrize("wished_at", [(3, 3, 3), (3, -1, -1), (-1, -1, 3), (3, 3, -1), (3, 4, -1), (4, 3, 5)])
def test_ranks_end_at_one_step_soon_after_one_of_them_wishes_to(wished_at: tuple[int, ...]) -> None:
    ended = end_together(wished_at)
    assert len(set(ended)) == 1
    assert ended[0] == 3 if wished_at == (3, 3, 3) else ended[0] > 3


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RankError, match=r"should_stop\) and waited 0\.1 s for rank 1"):
        StopAgreement(0, 2, HashStore(), timeout_s=0.1).ends(wished=True, step=3)


def test_ranks_skip_the_rest_of_an_epoch_only_together() -> None:
    store = HashStore()
    first, second = (StopAgreement(rank, 2, store, 20) for rank in range(2))
    for _ in range(2):  # epochs
        first.skipping.num_passed += 1
        second.skipping.num_passed += 1
        with ThreadPoolExecutor(2) as pool:
            for rank in [pool.submit(rank.skip, "in batch 1") for rank in (first, second)]:
                assert rank.result() is None
    first.skipping.num_passed += 1  # it goes on at the batch that the other one skips
    with ThreadPoolExecutor(1) as pool:
        skipped = pool.submit(second.skip, "in batch 0 of epoch 2")
        while not skipped.done():
            first.listen(store)
        with pytest.raises(RankError, match=r"rank 1 returned -1 from .* in batch 0 .* not on rank 0,"):
            skipped.result()


def test_a_rank_that_neither_skips_nor_goes_on_is_named() -> None:
    with pytest.raises(RankError, match=r"from on_train_batch_start in batch 2 and waited 0\.1 s for rank 1"):
        StopAgreement(0, 2, HashStore(), timeout_s=0.1).skip("in batch 2")
