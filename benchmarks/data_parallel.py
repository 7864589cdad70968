"""Compare replicas with one device, and measure the root's memory on a GPU.

    python benchmarks/data_parallel.py

    (a) a training step of two CPU replicas and of one device, dominated by computation
    (b) with a GPU: [cuda:0, cpu], peak memory of the root

All variants run interleaved in one process, round by round, on one intra-op thread; the table shows medians and the
quartiles of the rounds' ratios.
"""

import argparse
import os
import statistics
import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    SingleDeviceStrategy,
)
from evener.trainer import Trainer


class Mlp(pl.LightningModule):
    """Equal layers; the loss is the mean square of the output."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of the output of a chunk of shape (n, width)."""
        return self.layers(x).square().mean()

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """The chunk's loss."""
        return self(batch[0])

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        """The chunk's loss, logged."""
        self.log("loss", self(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def report(seconds: dict[str, list[float]], first: str, second: str) -> None:
    """Print the medians of both variants, and the median ratio."""
    ratios = sorted(a / b for a, b in zip(seconds[first], seconds[second], strict=True))
    low, middle, high = ratios[len(ratios) // 4], statistics.median(ratios), ratios[-len(ratios) // 4]
    for name in (first, second):
        print(f"    {name:44s} {statistics.median(seconds[name]) * 1e3:9.3f} ms a step")
    print(f"    {first} / {second}: {middle:.2f} (quartiles {low:.2f} to {high:.2f})\n")


class StepSeconds(pl.Callback):
    """Seconds of each training step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop the clock."""
        self.seconds.append(time.perf_counter() - self._start)


def make_trainer(strategy: Any, **options: Any) -> Trainer:
    """A trainer without output."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=strategy, **{"accelerator": "cpu", "max_epochs": 1, **quiet, **options})


def compute_bound(args: argparse.Namespace, batch_size: int) -> None:
    """(a)."""
    print(f"(a) 4 layers of width 512, batch of {batch_size}: training steps under the Trainer")
    loader = DataLoader(TensorDataset(torch.randn(batch_size * 6, 512)), batch_size=batch_size)
    plans = {"dp, 2 CPU replicas": (DataParallelStrategy, 2), "one device": (SingleDeviceStrategy, 1)}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(args.rounds):
        for name, (strategy, num_devices) in plans.items():
            clock = StepSeconds()
            trainer = make_trainer(strategy(), devices=num_devices, callbacks=[clock], limit_val_batches=0)
            trainer.fit(Mlp(4, 512), loader, loader)
            seconds[name].append(statistics.median(clock.seconds[1:]))
    report(seconds, "dp, 2 CPU replicas", "one device")


def on_gpu(args: argparse.Namespace) -> None:
    """(b)."""
    gpu = torch.device("cuda", 0)
    print(f"(b) {args.layers} layers of width 512, batch of 256 on [cuda:0, cpu]")
    for name, policy in (("even", {"weights": [1, 1]}), ("gpu0_chunk=8", {"gpu0_chunk": 8})):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(gpu)
        loader = DataLoader(TensorDataset(torch.randn(1024, 512)), batch_size=256)
        clock = StepSeconds()
        strategy = BalancedDataParallelStrategy(devices=["cuda:0", "cpu"], **policy)
        trainer = make_trainer(strategy, accelerator="cuda", devices=1, callbacks=[clock], limit_val_batches=0)
        trainer.fit(Mlp(args.layers, 512), loader, loader)
        peak = torch.cuda.max_memory_allocated(gpu) / 2**20
        step_ms = statistics.median(clock.seconds[1:]) * 1e3
        print(f"    [cuda:0, cpu], {name:14s} {step_ms:9.3f} ms a step, peak memory of cuda:0 {peak:8.1f} MiB")


def main() -> None:
    """Run all parts that this machine supports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="layers of (b)")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    for batch_size in (256, 1024):
        compute_bound(args, batch_size)
    if torch.cuda.is_available():
        on_gpu(args)
    else:
        print("(b) not run: this machine has no GPU")


if __name__ == "__main__":
    main()
