"""A rank that all others wait for is named; equal ranks on a busy machine are not."""

import logging
import random
import time
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from distributed import run_ranks
from tiny import Points, Tiny, quiet
from torch.utils.data import DataLoader, TensorDataset

from evener.trainer.callbacks import RunSummary, SlowRank
from evener.trainer.callbacks.device_monitor import Spread, slow_rank


def test_a_rank_is_slow_if_most_of_its_steps_take_longer_than_most_of_every_other() -> None:
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 100.0]) == (2.0, 3.0, 4.0)
    equal, slow = Spread(0.9, 1.0, 1.1), Spread(1.3, 1.5, 1.7)
    assert slow_rank([equal, slow, equal]) == 1  # 1.3 > 1.15 · 1.1
    assert slow_rank([equal, Spread(1.2, 1.5, 1.7), equal]) is None  # 1.2 < 1.265
    assert slow_rank([slow, slow, equal]) is None


def test_ten_runs_of_equal_ranks_name_none_under_load() -> None:
    for seed in range(10):
        noise = random.Random(seed)
        found: list[int | None] = []
        for _ in range(50):
            times = [[5 + 4 * sum(noise.random() < 0.3 for _ in range(7)) for _ in range(10)] for _ in range(2)]
            found.append(slow_rank(list(map(Spread.of, times))))
        assert not any(rank is not None and rank == after for rank, after in pairwise(found))


class Sleepy(Tiny):
    """One rank sleeps in every step."""

    sleepy: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.1 if self.global_rank == self.sleepy else 0.01)
        return super().training_step(batch, batch_idx)


def fit(sleepy: int | None) -> tuple[list[str], dict[str, float]]:
    """What is told, and the last values of the rank."""
    warnings.simplefilter("ignore")  # Lightning's own, and its advice for speed
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("evener.trainer.callbacks.device_monitor").addHandler(handler)
    summary, logger = RunSummary(), Points()
    options: dict[str, Any] = {"log_every_n_steps": 10, "logger": logger, "callbacks": [summary, SlowRank()]}
    trainer = quiet(strategy="ddp", devices=2, **options)
    module = Sleepy(4)
    module.sleepy = sleepy
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(160, 4)), batch_size=2))
    return told, logger.last()


@pytest.mark.parametrize("sleepy", [None, 1])
def test_the_rank_that_sleeps_is_named_once_by_rank_0(sleepy: int | None) -> None:
    (first, values), (second, _) = run_ranks(fit, 2, sleepy)
    assert second == []
    assert [text[:12] for text in first] == ([] if sleepy is None else ["Rank 1 takes"])
    assert all("strategy=balanced_ddp" in text for text in first)
    assert 0 <= values["speed/communication_ms"] < values["speed/step_ms"]  # as torch's wrapper has measured
