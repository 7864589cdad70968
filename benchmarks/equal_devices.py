"""Measure what `auto` shares cost, and what they become, where the devices are equal: against fixed equal shares.

    python benchmarks/equal_devices.py                                    # balanced_dp on two CPU devices
    torchrun --nproc-per-node=2 benchmarks/equal_devices.py               # balanced_ddp on two ranks
    ... [--load 6]                                                        # with as many other busy processes

Both variants train in turns in the same processes. The cost is processor time of a step, of rank 0 under torchrun; the
deviation is how far the first device's share is from one half, in percentage points, over all steps: its median and its
largest value.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import BalancedDataParallelStrategy, BalancedDDPStrategy
from evener.trainer import Trainer

WIDTH = 512


class Mlp(pl.LightningModule):
    """Four equal layers.

    Attributes:
        first_chunks: samples of each step's first chunk, the first device's; replicas share the list.
        is_first: whether the next chunk is the first of its step.
    """

    first_chunks: list[int]
    is_first = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean square of the output of a chunk of shape (n, WIDTH)."""
        if Mlp.is_first:
            Mlp.first_chunks.append(len(batch[0]))
            Mlp.is_first = False
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Meter(pl.Callback):
    """Processor time per step, and the first device's samples in each."""

    def on_train_start(self, *_: Any) -> None:
        """Start."""
        Mlp.first_chunks = []
        self.start_s = time.process_time()

    def on_train_batch_start(self, *_: Any) -> None:
        """The next chunk is the first."""
        Mlp.is_first = True

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop."""
        self.seconds = (time.process_time() - self.start_s) / trainer.global_step
        self.first_chunks = Mlp.first_chunks


def train(weights: Any, options: argparse.Namespace, distributed: bool) -> Meter:
    loader = DataLoader(TensorDataset(torch.randn(options.steps * options.batch, WIDTH)), options.batch)
    strategy = (
        BalancedDDPStrategy(weights)
        if distributed
        else BalancedDataParallelStrategy(weights=weights, devices=["cpu", "cpu"])
    )
    meter = Meter()
    trainer = Trainer(
        strategy=strategy, devices=2 if distributed else 1, accelerator="cpu", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[meter],
    )  # fmt: skip
    trainer.fit(Mlp(), loader)
    return meter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="samples of a global batch")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--load", type=int, default=0, help="other busy processes")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, distributed = int(os.environ.get("RANK", "0")), "RANK" in os.environ
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.load if not rank else 0)
    ]
    try:
        found: dict[str, list[Meter]] = {"auto": [], "fixed": []}
        for number in range(options.rounds + 1):
            for name, weights in (("auto", "auto"), ("fixed", [1, 1])):
                meter = train(weights, options, distributed)
                if number:  # the first round warms up
                    found[name].append(meter)
    finally:
        for process in busy:
            process.kill()
    if rank:
        return
    ratios = sorted(a.seconds / f.seconds for a, f in zip(found["auto"], found["fixed"], strict=True))
    away = [abs(num / options.batch - 0.5) * 100 for meter in found["auto"] for num in meter.first_chunks]
    each = {name: statistics.median(meter.seconds for meter in meters) * 1e3 for name, meters in found.items()}
    print(f"auto {each['auto']:.2f} ms a step, fixed {each['fixed']:.2f} ms: {statistics.median(ratios):.3f} x")
    print(f"    (from {ratios[0]:.3f} to {ratios[-1]:.3f} in {len(ratios)} rounds)")
    print(
        f"share of the first device: median {statistics.median(away):.1f}, at most {max(away):.1f} points from one half"
    )


if __name__ == "__main__":
    main()
