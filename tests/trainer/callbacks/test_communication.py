"""Under DDP the time of communication that training waits for is logged."""

import warnings
from typing import Any

import torch
from distributed import run_ranks
from tiny import Points, Tiny, quiet
from torch.utils.data import DataLoader, TensorDataset

from evener.trainer.callbacks import RunSummary


def fit() -> dict[str, float]:
    """The last values of the rank."""
    warnings.simplefilter("ignore")  # Lightning's own, and its advice for speed
    logger = Points()
    options: dict[str, Any] = {"log_every_n_steps": 10, "logger": logger, "callbacks": [RunSummary()]}
    trainer = quiet(strategy="ddp", devices=2, **options)
    trainer.fit(Tiny(4), DataLoader(TensorDataset(torch.randn(160, 4)), batch_size=2))
    return logger.last()


def test_the_time_of_communication_is_logged() -> None:
    values, _ = run_ranks(fit, 2)
    assert values["speed/communication_ms"] >= 0  # as torch's wrapper has measured, of one step
