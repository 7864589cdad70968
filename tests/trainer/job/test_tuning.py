"""`data.batch_size=auto` finds the largest batch that fits, and leaves no trace."""

import random
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from tiny import Tiny
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import ConfigError
from evener.trainer.job.start import largest, with_batch_size


class Greedy(Tiny):
    """Needs more memory than there is for more than so many samples."""

    tried: list[int] = []  # noqa: RUF012  # of all instances: every attempt has a new one

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.tried.append(len(batch[0]))
        torch.rand(1), random.random(), np.random.rand()
        if len(batch[0]) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch, batch_idx)


class Numbers(pl.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.rand(64, 1)), batch_size=self.batch_size, shuffle=True)


def found(limit: int) -> int:
    """The batch size that takes the place of `auto` for a module with a limit."""
    data, module = {"_target_": f"{__name__}.Numbers", "batch_size": "auto"}, {"_target_": f"{__name__}.Greedy"}
    trainer = {"_target_": "evener.trainer.Trainer", "accelerator": "cpu", "devices": 1}
    strategy = {"_target_": "evener.strategies.SingleDeviceStrategy"}
    cfg = {"data": data, "module": {**module, "limit": limit}, "trainer": trainer, "strategy": strategy}
    return with_batch_size(OmegaConf.create(cfg)).data.batch_size


@pytest.mark.parametrize("limit", [1, 37, 10**6])
def test_the_largest_size_is_found_and_confirmed_by_a_run_and_the_random_state_is_put_back(limit: int) -> None:
    def drawn() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]

    Greedy.tried.clear()
    before = drawn()
    size = found(limit)
    assert drawn() == before
    assert size == min(limit, 64)
    assert Greedy.tried[-1] == size or Greedy.tried[-1] == 64 % size
    assert len({sizes for sizes in Greedy.tried if sizes > limit}) < 10


def test_a_size_that_fits_no_longer_is_made_smaller_and_where_none_fits_it_is_told() -> None:
    answers = iter([True, True, True, False, False, True])  # 1, 2, 4 of 5; 5 does not; 4 no longer does; 3 does
    assert largest(lambda size: next(answers), 5) == 3
    with pytest.raises(ConfigError, match="a batch of one sample does not fit into memory"):
        found(0)
