"""Measure what snapshots in memory cost a step: a state of 200 MB, one snapshot every 10 steps.

    python benchmarks/snapshots.py

Runs with and without snapshots take turns. The processor time of the training thread, and of all threads, is shown
beside the time that passed, which other load on the machine affects more. A second table has the time of the snapshots
themselves, after the first two of a run, which allocate memory.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from evener.trainer import Trainer
from evener.trainer.checkpoint import Checkpoint

WIDTH = 2048


class Wide(pl.LightningModule):
    """Layers whose parameters, with AdamW's moments, have the size asked for; it notes when each step begins."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        num = max(1, round(megabytes * 2**20 / (3 * 4 * WIDTH * WIDTH)))
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(num)])
        self.begun: list[Times] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.begun.append(now())
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


Times = tuple[float, ...]
"""Seconds: that passed, of processor time of the training thread, and of all threads."""


class Timer(pl.Callback):
    """Measures each snapshot."""

    def __init__(self, saver: Checkpoint) -> None:
        self.saver = saver
        self.found: list[Times] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if (snapshots := self.saver.snapshots) is None:
            return
        take = snapshots.take

        def timed(trainer: pl.Trainer) -> None:
            before = now()
            take(trainer)
            self.found.append(difference(before, now()))

        snapshots.take = timed  # type: ignore[method-assign]


def now() -> Times:
    return time.perf_counter(), time.thread_time(), time.process_time()


def difference(start: Times, end: Times) -> Times:
    return tuple(b - a for a, b in zip(start, end, strict=True))


def train(megabytes: int, every: int | None, steps: int) -> tuple[Times, list[Times]]:
    """Train, and return the mean times of a step, and those of each snapshot but the first two."""
    module = Wide(megabytes)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saver = Checkpoint(folder, every_n_epochs=2, save_last=False, snapshot_every_n_steps=every)
        timer = Timer(saver)
        trainer = Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[saver, timer],
        )  # fmt: skip
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(32 * steps, WIDTH)), 32))
        if saver.snapshots is not None:
            saver.snapshots.end()
    first, last = module.begun[20], module.begun[-1]
    return tuple(total / (len(module.begun) - 21) for total in difference(first, last)), timer.found[2:]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=51)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between two snapshots")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps: dict[int | None, list[Times]] = {None: [], options.every: []}
    snapshots: list[Times] = []
    for _ in range(options.rounds):
        for every, times in steps.items():
            step, taken = train(options.megabytes, every, options.steps)
            times.append(step)
            snapshots += taken
    print("snapshots | step, ms | its thread, ms | all threads, ms")
    for every, times in steps.items():
        print(
            row(
                "none" if every is None else f"every {every}",
                [statistics.median(column) for column in zip(*times, strict=True)],
            )
        )
    print(f"\n{len(snapshots)} snapshots | passed, ms | its thread, ms | all threads, ms")
    for name, choose in (("least", min), ("median", statistics.median), ("most", max)):
        print(row(name, [choose(column) for column in zip(*snapshots, strict=True)]))
    between = options.every * statistics.median(step for step, *_ in steps[None])
    print(f"\n{statistics.median(passed for passed, *_ in snapshots) / between:.1%} of the time between two snapshots")


def row(name: str, seconds: list[float]) -> str:
    passed, thread, process = (1000 * value for value in seconds)
    return f"{name:9} | {passed:8.1f} | {thread:14.1f} | {process:.1f}"


if __name__ == "__main__":
    main()
