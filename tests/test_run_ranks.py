"""The helper that runs every distributed test: results by rank, and a hang that fails instead of waiting."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import RankError, run_ranks
from torch.utils.data import DataLoader


def _sum_of_ranks() -> float:
    dist.init_process_group("gloo")
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def _rank_1_raises() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("only here")


def _rank_1_hangs() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(60)


class _Hanging(list[int]):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(60)


def _a_data_worker_hangs() -> list[int]:
    hanging: Any = _Hanging([0])
    return list(DataLoader(hanging, num_workers=1, multiprocessing_context="fork"))


def test_ranks_talk_and_results_come_back_by_rank() -> None:
    assert run_ranks(_sum_of_ranks, 3) == [6.0, 6.0, 6.0]


@pytest.mark.parametrize(
    ("function", "num_ranks", "told"),
    [
        (_rank_1_raises, 2, r"(?s)rank 1: exit code 1.*_rank_1_raises.*only here"),
        (_rank_1_hangs, 2, r"(?s)rank 1: exit code -9.*_rank_1_hangs"),
        (_a_data_worker_hangs, 1, r"in __getitem__\n"),
    ],
)
def test_a_rank_that_fails_or_hangs_is_named_with_its_stack(function: Any, num_ranks: int, told: str) -> None:
    run_ranks(_sum_of_ranks, 1)  # the server of forks has imported torch
    with pytest.raises(RankError, match=told):
        run_ranks(function, num_ranks, timeout_s=10)
