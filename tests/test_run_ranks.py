"""The helper that runs every distributed test: results by rank, and a hang that fails instead of waiting."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from distributed import RankError, run_ranks
from torch.utils.data import DataLoader, Dataset


def _sum_of_ranks() -> float:
    dist.init_process_group("gloo")
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def _rank_1_raises() -> int:
    if os.environ["RANK"] == "1":
        raise KeyError("only here")
    return 0


def _rank_1_hangs() -> int:
    if os.environ["RANK"] == "1":
        time.sleep(60)
    return 0


class _Hanging(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(60)
        return 0


def _a_data_worker_hangs() -> list[int]:
    return list(DataLoader(_Hanging(), num_workers=1, multiprocessing_context="fork"))


def test_ranks_talk_and_results_come_back_by_rank() -> None:
    assert run_ranks(_sum_of_ranks, 3) == [6.0, 6.0, 6.0]


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: exit code 1.*_rank_1_raises.*only here"):
        run_ranks(_rank_1_raises, 2)


def test_a_hang_fails_at_the_timeout_with_the_stack() -> None:
    run_ranks(_sum_of_ranks, 1)  # the server of forks has imported torch
    with pytest.raises(RankError, match=r"(?s)rank 1: exit code -9.*_rank_1_hangs"):
        run_ranks(_rank_1_hangs, 2, timeout_s=10)


def test_a_hang_in_a_data_worker_fails_with_the_stack_of_the_worker() -> None:
    run_ranks(_sum_of_ranks, 1)
    with pytest.raises(RankError, match=r"in __getitem__\n"):
        run_ranks(_a_data_worker_hangs, 1, timeout_s=10)
