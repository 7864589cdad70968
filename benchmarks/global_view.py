"""Compare `ddp` with and without `global_view`: milliseconds, bytes that a rank receives, and memory of a step.

    python benchmarks/global_view.py [--ranks 2] [--rounds 3] [--steps 40]

Ranks are processes on the CPU (gloo, one thread each). Both are trained in turns; a time is the median of a round's
steps, and the table has the shortest of all rounds. Memory is the peak above what rank 0 had before the first step.
"""

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from communication import bytes_received
from sharded_memory import MIB, memory_mib
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import DDPStrategy
from evener.trainer import Trainer

NETWORKS = {"3 linear layers of 16, batch 16": (16, 3, 16), "8 linear layers of 512, batch 128": (512, 8, 128)}
"""Width, depth and global batch."""
FIRST = 5
"""Steps before the measurement begins."""


class Layers(pl.LightningModule):
    """Linear layers with activations between them, and a mean as loss."""

    def __init__(self, width: int, depth: int, normalized: bool) -> None:
        super().__init__()
        layers = [[nn.Linear(width, width), nn.BatchNorm1d(width) if normalized else nn.ReLU()] for _ in range(depth)]
        self.net = nn.Sequential(*(one for pair in layers for one in pair))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Meter(pl.Callback):
    """Measures steps, and writes milliseconds, bytes and mebibytes of rank 0 to a file."""

    def __init__(self, file: Path) -> None:
        self._file, self._times = file, list[float]()
        self._bytes, self._memory = 0, 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins here
        self._memory = memory_mib("VmRSS")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._times.append(time.perf_counter())
        if len(self._times) == FIRST:
            self._bytes = bytes_received()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        times = self._times[FIRST - 1 :]
        steps = [(end - begin) * 1000 for begin, end in pairwise(times)]
        received = (bytes_received() - self._bytes) / len(steps)
        if trainer.global_rank == 0:
            found = (statistics.median(steps), received, memory_mib("VmHWM") - self._memory)
            self._file.write_text(" ".join(map(str, found)), encoding="utf-8")


def measure(size: tuple[int, int, int], normalized: bool, global_view: bool, ranks: int, steps: int) -> list[float]:
    """Milliseconds, bytes and mebibytes."""
    width, depth, batch = size
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(batch * steps, width))
    strategy = DDPStrategy(batch_size_is="global", global_view=global_view, verify=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found")
        trainer = Trainer(
            strategy=strategy, devices=ranks, accelerator="cpu", max_epochs=1, logger=False, callbacks=[Meter(file)],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Layers(width, depth, normalized), DataLoader(data, batch))
        return [float(word) for word in file.read_text(encoding="utf-8").split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="steps of a round")
    options = parser.parse_args()
    if "MALLOC_ARENA_MAX" not in os.environ:  # freed tensors go back to the system at once
        allocator = {"MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_ARENA_MAX": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **allocator})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("| network | | ms per step | received by a rank, KB | memory, MiB |\n|---|---|---:|---:|---:|")
    for name, size in NETWORKS.items():
        for normalized in (False, True):
            rounds: dict[bool, list[list[float]]] = {False: [], True: []}
            for _ in range(options.rounds):
                for view, found in rounds.items():
                    found.append(measure(size, normalized, view, options.ranks, options.steps))
            for view, found in rounds.items():
                ms, received, memory = (min(values) for values in zip(*found, strict=True))
                told = f"{name}{', with BatchNorm' * normalized}", "`global_view=true`" if view else "`ddp`"
                print(f"| {' | '.join(told)} | {ms:.1f} | {received / 1000:.1f} | {memory:.1f} |", flush=True)


if __name__ == "__main__":
    main()
