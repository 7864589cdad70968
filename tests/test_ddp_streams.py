"""Random streams of ranks and workers; several runs in one process and at once; what is logged within an epoch."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from distributed import RankError, run_ranks, run_ranks_unchecked
from test_ddp import Net, Numbered, quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from evener.strategies import DDPStrategy


class Draws(Dataset[Tensor]):
    """Each sample is what its worker draws: worker, python, numpy, torch."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        worker = -1 if info is None else info.id
        return torch.tensor([worker, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Keeper(pl.LightningModule):
    """Keeps what was drawn, and logs its values step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1).double()
        self.drawn: list[tuple[int, list[float]]] = []
        self.logged: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.drawn += [(self.current_epoch, row) for row in batch.tolist()]
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _draw(num_workers: int) -> list[tuple[int, list[float]]]:
    pl.seed_everything(3, workers=True, verbose=False)
    module = Keeper()
    trainer = quiet_trainer(DDPStrategy(timeout_s=20), 2, max_epochs=2)
    trainer.fit(module, DataLoader(Draws(), 2, num_workers=num_workers))
    return module.drawn


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_rank_and_worker_draws_its_own_and_the_same_again(num_workers: int) -> None:
    ranks = run_ranks(_draw, 2, num_workers)
    for column in (1, 2, 3):
        values = [row[column] for drawn in ranks for _, row in drawn]
        assert len(values) == len(set(values)) == 32, "no two draws are equal, in two epochs of 16 samples"
    assert {row[0] for _, row in ranks[0]} == ({0.0, 1.0} if num_workers else {-1.0})
    assert run_ranks(_draw, 2, num_workers) == ranks


def test_two_runs_at_once_do_not_meet() -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: run_ranks(_draw, 2, 0), range(2))
    assert one == other


class Steps(Net):
    """Logs the mean index of its part of the batch, shared at once."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("index", batch[2].double().mean(), on_step=True, on_epoch=False, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.validated.append(self.trainer.callback_metrics["index"].item())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", batch[2].double().mean())


class Ambiguous(Net):
    """With a batch of tensors of unequal lengths."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0], batch[1][:1]]


def _log_steps() -> tuple[list[float], list[float]]:
    module = Steps()
    trainer = quiet_trainer(DDPStrategy(batch_size_is="global", timeout_s=20), 2, max_epochs=1)
    trainer.fit(module, DataLoader(Numbered(5), 3))
    trainer.test(module, DataLoader(Numbered(5), 3), verbose=False)
    tested = trainer.callback_metrics["tested"].item()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, DataLoader(Numbered(5), 3))
    return module.validated, [tested, trainer.current_epoch]


def _log_ambiguous() -> None:
    quiet_trainer(DDPStrategy(timeout_s=5), 2, max_epochs=1).fit(Ambiguous(), DataLoader(Numbered(8), 2))


def test_values_of_a_step_weigh_by_samples_and_one_trainer_fits_tests_and_fits() -> None:
    for values, (tested, epochs) in run_ranks(_log_steps, 2):
        assert values == pytest.approx([1.0, 3.5] * 2, abs=1e-12)  # means of 0, 1, 2 (2 and 1 of them) and of 3, 4
        assert tested == pytest.approx(2.0, abs=1e-12)
        assert epochs == 2


def test_a_batch_whose_samples_cannot_be_counted_is_refused() -> None:
    outcome = run_ranks_unchecked(_log_ambiguous, 2)[0]
    with pytest.raises(RankError, match=r"self.log\('loss'\): the batch holds tensors of 1 and 2 rows"):
        raise outcome
