"""Runs that are killed: a small training in a process of its own, which tells what it did line by line."""

import json
import multiprocessing
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from distributed import torchrun_env
from fork_server import hear_signals
from tiny import quiet
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchmetrics import MeanMetric, RunningMean

from evener.trainer.checkpoint._callback import Checkpoint
from evener.trainer.checkpoint.file_io import find_newest
from evener.trainer.job.log_file import graceful_stop
from evener.trainer.loggers.journal import TensorBoardLogger

NUM_SAMPLES = 22
BATCH_SIZE = 4
BATCHES_PER_EPOCH = 6
NUM_EPOCHS = 2


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Samples with noise from all three libraries, and their numbers."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = random.random() + np.random.rand() + torch.rand(())
        return torch.full((3,), index / 10, dtype=torch.float64) + noise, index


class Streamed(IterableDataset[tuple[torch.Tensor, int]]):
    """The samples in order, shared among workers, of no known length; with noise in workers only."""

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, NUM_SAMPLES, step):
            noise = 0.0 if worker is None else random.random() + np.random.rand() + torch.rand(())
            yield torch.full((3,), index / 10, dtype=torch.float64) + noise, index


class Batched:
    """An iterable of batches that is no DataLoader, in another order in every epoch."""

    def __iter__(self) -> Any:
        for rows in torch.randperm(NUM_SAMPLES).split(BATCH_SIZE):
            yield rows[:, None].expand(-1, 3).double() / 10, rows


class Recorder(pl.LightningModule):
    """Writes sample numbers and loss of every batch to a file, and kills its process where it is told to."""

    def __init__(self, record: Path, kill_at: str | None, plan: "Plan") -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        ).double()
        self.mean, self.recent = MeanMetric(), RunningMean(window=3)
        self.val_mean = MeanMetric()
        self.record = record
        self.kill_at = kill_at
        self.plan = plan
        self.dataset = plan.dataset()

    def mark(self, place: str) -> None:
        everywhere = self.plan.signum == signal.SIGKILL
        if place == self.kill_at and (everywhere or self.global_rank == self.plan.num_ranks - 1):
            os.kill(os.getpid(), self.plan.signum)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.mark(f"step {self.trainer.current_epoch} {batch_idx}")
        inputs, ids = batch
        loss = self.layers(inputs).square().mean()
        if not self.layers[1].training:  # the verifier looks at a few samples, without dropout
            return loss
        self.mean.update(loss.detach(), len(ids))
        self.recent.update(loss.detach())
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(ids), sync_dist=True)
        line = [self.trainer.current_epoch, batch_idx, ids.tolist(), loss.item().hex()]
        with open(f"{self.record}.{self.global_rank}", "a") as file:
            file.write(json.dumps(line) + "\n")
        return loss

    def on_train_epoch_end(self) -> None:
        self.mark(f"epoch end {self.trainer.current_epoch}")
        self.log("train/mean", self.mean.compute(), sync_dist=True)
        self.log("train/recent", self.recent.compute(), sync_dist=True)
        self.mean.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.layers(batch[0]).square().mean()
        self.log("val/loss", loss, sync_dist=True)
        self.val_mean.update(loss, len(batch[1]))
        if (
            torch.initial_seed() < 3 or self.trainer.sanity_checking
        ):  # the verifier, with its seeds, looks at a few samples
            return
        self.mark(f"validation {self.trainer.current_epoch}")
        self.mark(f"validation at {self.trainer.global_step}")
        time.sleep(self.plan.val_pause_s)
        with open(f"{self.record}.val.{self.global_rank}", "a") as file:
            file.write(json.dumps([self.trainer.current_epoch, batch_idx, batch[1].tolist(), loss.item().hex()]) + "\n")

    def on_validation_epoch_end(self) -> None:
        self.log("val/mean", self.val_mean.compute(), sync_dist=True)
        self.val_mean.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

    def train_dataloader(self) -> Any:
        if isinstance(self.dataset, Batched):
            return self.dataset
        return DataLoader(
            self.dataset, BATCH_SIZE, shuffle=isinstance(self.dataset, Augmented), num_workers=self.plan.num_workers,
            multiprocessing_context="fork" if self.plan.num_workers else None, **self.plan.train_loader,
        )  # fmt: skip

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Augmented(), **{"batch_size": 11, **self.plan.val_loader})


@dataclass
class Plan:
    """One kind of run."""

    num_workers: int = 0
    accumulate: int = 1
    checkpoint: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: str | Callable[[], Any] = "single_device"
    num_ranks: int = 1
    tensorboard: bool = False
    devices: int | list[str] = 1
    signum: int = signal.SIGKILL
    dataset: Callable[[], Any] = Augmented
    train_loader: dict[str, Any] = field(default_factory=dict)
    val_loader: dict[str, Any] = field(default_factory=dict)
    val_pause_s: float = 0.0

    @property
    def num_batches(self) -> int:
        """Number of batches that a rank trains on."""
        return self.trainer.get("max_steps", NUM_EPOCHS * self.batches_per_epoch)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of a rank in an epoch."""
        if self.dataset is Streamed:  # every rank has a stream of its own
            return BATCHES_PER_EPOCH
        return -(-BATCHES_PER_EPOCH // self.num_ranks)

    @property
    def places(self) -> list[str]:
        """Where a run can be killed, in order: at every step but the first, in validation, at the end of an epoch."""
        places: list[str] = []
        for batch in range(self.num_batches):
            epoch, index = divmod(batch, self.batches_per_epoch)
            places.append(f"step {epoch} {index}")
            if index == self.batches_per_epoch - 1:
                places += [f"validation {epoch}", f"epoch end {epoch}"]
        return places[1:]

    @property
    def killed_status(self) -> int:
        """The exit status of a process that ends by the signal."""
        return -signal.SIGKILL if self.signum == signal.SIGKILL else 128 + self.signum

    def attempt(self, directory: Path, name: str, kill_at: str | None = None) -> bool:
        """Do `run` in processes of its own; return whether it came to its end."""
        if self.num_ranks == 1:
            status = in_child(self.run, directory, name, kill_at)
            assert status in (0, self.killed_status)
            return status == 0
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        statuses = in_children(
            [partial(self.run_rank, rank, store.port, directory, name, kill_at) for rank in range(self.num_ranks)]
        )
        heard = {1} if self.signum == signal.SIGKILL else set[int]()  # of the other's death, before its own
        assert set(statuses) == {0} or {self.killed_status} <= set(statuses) <= {self.killed_status, *heard}, statuses
        return set(statuses) == {0}

    def run_rank(self, rank: int, port: int, *args: Any) -> None:
        """Do `run` as one rank of several."""
        os.environ.update(torchrun_env(rank, self.num_ranks, port))
        self.run(*args)

    def run(self, directory: Path, name: str, kill_at: str | None = None) -> None:
        """Train in this process from the newest checkpoint of the directory; record everything under a name."""
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # Lightning's advice on workers and the like
        pl.seed_everything(7, workers=True, verbose=False)
        module = Recorder(directory / name, kill_at, self)
        trainer = quiet(
            max_epochs=NUM_EPOCHS, accumulate_grad_batches=self.accumulate, devices=self.devices, log_every_n_steps=1,
            callbacks=[Checkpoint(directory / "checkpoints", **self.checkpoint)],
            logger=TensorBoardLogger(directory / "tensorboard") if self.tensorboard else False,
            strategy=self.strategy if isinstance(self.strategy, str) else self.strategy(), **self.trainer,
        )  # fmt: skip
        newest = find_newest(directory)
        with graceful_stop(trainer):
            trainer.fit(module, ckpt_path=None if newest is None else str(newest))
        if trainer.is_global_zero:
            metrics = {key: float(value).hex() for key, value in trainer.callback_metrics.items()}
            torch.save((module.state_dict(), metrics), directory / f"{name}.end")


def in_child(work: Callable[..., None], *args: Any) -> int:
    """Run a function in a forked process; return its exit status (minus the signal that killed it)."""
    return in_children([partial(work, *args)])[0]


def in_children(works: list[Callable[[], None]], timeout_s: float = 300) -> list[int]:
    """Run functions in forked processes at once; return their exit statuses."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_hearing, args=(work,)) for work in works]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    while None in (statuses := [process.exitcode for process in processes]):
        # `join` would wait for the data workers of a killed process, too
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
            raise TimeoutError(f"still running after {timeout_s} s")
        time.sleep(0.01)
    return [status for status in statuses if status is not None]


def _hearing(work: Callable[[], None]) -> None:
    hear_signals()
    work()


def lines(directory: Path, name: str, rank: int = 0) -> list[Any]:
    """What a run recorded."""
    path = directory / f"{name}.{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
