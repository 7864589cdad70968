"""The helper that runs every distributed test: a hang fails, with its stack, instead of waiting."""

import os
import time
from typing import Any

import pytest
from distributed import RankError, run_ranks
from torch.utils.data import DataLoader


def _rank_1_hangs() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(60)


class _Hanging(list[int]):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(60)


def _a_data_worker_hangs() -> list[int]:
    hanging: Any = _Hanging([0])
    return list(DataLoader(hanging, num_workers=1, multiprocessing_context="fork"))


@pytest.mark.parametrize(
    ("function", "num_ranks", "told"),
    [
        (_rank_1_hangs, 2, r"(?s)rank 1: exit code -9.*_rank_1_hangs"),
        (_a_data_worker_hangs, 1, r"in __getitem__\n"),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_stack(function: Any, num_ranks: int, told: str) -> None:
    run_ranks(os.getpid, 1)  # the server of forks has imported torch
    with pytest.raises(RankError, match=told):
        run_ranks(function, num_ranks, timeout_s=10)
