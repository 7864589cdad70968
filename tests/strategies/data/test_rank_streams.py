"""Random streams of ranks and workers; several runs at once; what is logged within an epoch."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from distributed import RankError, run_ranks
from regression import Net, Numbered, Points, quiet_trainer
from tiny import Tiny
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from evener.strategies import DDPModelParallelStrategy, DDPStrategy, FSDPStrategy


class Draws(Dataset[Tensor]):
    """Each sample is what its worker draws: worker, python, numpy, torch."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        worker = -1 if info is None else info.id
        return torch.tensor([worker, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Keeper(Tiny):
    """Keeps what was drawn, and when."""

    def __init__(self) -> None:
        super().__init__(4)
        self.double()
        self.drawn: list[tuple[int, list[float]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.drawn += [(self.current_epoch, row) for row in batch.tolist()]
        return super().training_step(batch, batch_idx)


def _draw(num_workers: int) -> list[tuple[int, list[float]]]:
    pl.seed_everything(3, workers=True, verbose=False)
    module = Keeper()
    trainer = quiet_trainer(DDPStrategy(timeout_s=120), 2, max_epochs=2)
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


class Evaluated(Net):
    """Logs in evaluation by step: a shared mean, a shared sum, and its own rank."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("index", batch[2].double().mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log("num", float(len(batch[2])), on_step=True, on_epoch=False, reduce_fx="sum", sync_dist=True)
        self.log("rank", float(self.global_rank), on_step=True, on_epoch=False)


class Ends(IterableDataset[Any]):
    """Three batches for rank 0 and one for rank 1."""

    def __iter__(self) -> Iterator[Any]:
        data = Numbered()
        rows = [[0, 1], [2, 3], [4, 5]] if torch.distributed.get_rank() == 0 else [[6, 7, 8]]
        yield from ([data.x[row], data.y[row], torch.tensor(row)] for row in rows)


def _evaluate() -> list[list[tuple[int | None, dict[str, float]]]]:
    found = []
    loaders = [DataLoader(Numbered(5), 3), DataLoader(Numbered(3), 2), DataLoader(Ends(), None)]
    for loader, batch_size_is in zip(loaders, ("global", "global", "per_device"), strict=True):
        logger = Points()
        strategy = DDPStrategy(batch_size_is=batch_size_is, timeout_s=120)
        quiet_trainer(strategy, 2, logger=logger).validate(Evaluated(), loader, verbose=False)
        found.append(logger.points)
    return found


def test_values_of_an_evaluation_weigh_by_samples_whatever_batches_a_rank_has() -> None:
    found = run_ranks(_evaluate, 2)[0]
    assert [points[-1] for points in found] == [(0, {"index_epoch": mean}) for mean in (2.0, 1.0, 4.0)]


class Sharded(IterableDataset[Any]):
    """Shards itself by rank: indices and noise are of the samples that a rank reads."""

    def __iter__(self) -> Iterator[Any]:
        yield from list(Numbered(8))[torch.distributed.get_rank() :: 2]  # type: ignore[call-overload]


class Noisy(IterableDataset[Any]):
    """Yields all samples, with noise that is drawn alike on all ranks."""

    def __iter__(self) -> Iterator[Any]:
        for x, y, index in Numbered(8):  # type: ignore[attr-defined]
            yield x + torch.randn(x.shape[0], dtype=x.dtype), y, index


def _fit_stream(dataset: Any, batch_size_is: Any, kind: Any = DDPStrategy, devices: int = 2) -> None:
    trainer = quiet_trainer(kind(batch_size_is=batch_size_is, timeout_s=60), devices, max_epochs=1)
    trainer.fit(Net(), DataLoader(dataset(), 2))


def test_a_stream_that_differs_between_ranks_is_not_divided() -> None:
    told = r"ConfigError: %s: .*rank 1 has read another first batch than rank 0.*batch_size_is=per_device"
    for kind, devices in (DDPStrategy, 2), (DDPModelParallelStrategy, 4), (FSDPStrategy, 2):
        with pytest.raises(RankError, match=told % kind.strategy_name):
            run_ranks(_fit_stream, 2, Sharded, "global", kind, devices)
    run_ranks(_fit_stream, 2, Sharded, "per_device")
    run_ranks(_fit_stream, 2, Noisy, "global")


class Gathers(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.testing.assert_close(self.all_gather(batch[2]).flatten(0, 1).sort().values % 3, torch.arange(3))
        self.all_gather(batch[0].flatten() if batch_idx else batch[0][:, : len(batch[0])])  # of 2 and 1 columns


def _fit_gathering() -> None:
    trainer = quiet_trainer(DDPStrategy(batch_size_is="global", timeout_s=60), 2, max_epochs=1)
    trainer.fit(Gathers(), DataLoader(Numbered(6), 3))


def test_gathering_rows_of_other_shapes_is_refused_by_name() -> None:
    with pytest.raises(RankError, match=r"all_gather was given tensors that differ in more .* rank 0, .* rank 1"):
        run_ranks(_fit_gathering, 2)
