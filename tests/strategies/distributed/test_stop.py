"""Ranks agree on the step to stop at: simulated in lockstep, with every pace at which threads may hear of it."""

import itertools

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


def test_a_rank_synchronizes_its_devices_before_it_counts_as_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    store, seen = HashStore(), dict[str, bool]()
    monkeypatch.setattr(
        torch.accelerator, "synchronize",
        lambda device: seen.update({str(device): store.check(["stop/training/armed/0"])}),
    )  # fmt: skip
    rank = StopAgreement(0, 2, store, devices=[torch.device(name) for name in ("cuda:0", "cpu", "cuda:1")])
    rank.request(15)
    rank.due(3)
    assert seen == {"cuda:0": False, "cuda:1": False}
    assert store.check(["stop/training/armed/0"])


def test_a_rank_that_does_not_come_is_named() -> None:
    alone = StopAgreement(0, 2, HashStore(), timeout_s=0.1)
    with pytest.raises(RankError, match=r"should_stop\) and waited 0\.1 s for rank 1"):
        alone.ends(wished=True, step=3)
