"""Measure what snapshots in memory cost a step: a state of 200 MB, one snapshot every 10 steps.

    python benchmarks/snapshots.py

Runs with and without snapshots take turns. The processor time of the training thread, and of all threads, is shown
beside the time that passed, which other load on the machine affects more.
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
        self.begun: list[tuple[float, float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.begun.append((time.perf_counter(), time.thread_time(), time.process_time()))
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def train(megabytes: int, every: int | None, steps: int) -> tuple[float, ...]:
    """Train, and return the mean seconds of a step: that passed, of the training thread, and of all threads."""
    module = Wide(megabytes)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saver = Checkpoint(folder, every_n_epochs=2, save_last=False, snapshot_every_n_steps=every)
        trainer = Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[saver],
        )  # fmt: skip
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(32 * steps, WIDTH)), 32))
        if saver.snapshots is not None:
            saver.snapshots.end()
    first, last = module.begun[20], module.begun[-1]  # the first two snapshots allocate memory
    return tuple((b - a) / (len(module.begun) - 21) for a, b in zip(first, last, strict=True))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=51)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between two snapshots")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[int | None, list[tuple[float, ...]]] = {None: [], options.every: []}
    for _ in range(options.rounds):
        for every, times in found.items():
            times.append(train(options.megabytes, every, options.steps))
    print("snapshots | step, ms | its thread, ms | all threads, ms")
    for every, times in found.items():
        step, thread, process = (1000 * statistics.median(column) for column in zip(*times, strict=True))
        print(f"{'none' if every is None else f'every {every}':9} | {step:8.1f} | {thread:14.1f} | {process:.1f}")


if __name__ == "__main__":
    main()
