"""Compare throughput and losses of `balanced_ddp` and `ddp` on two ranks, one of which is slowed per sample.

    torchrun --nproc-per-node=2 benchmarks/uneven_ranks.py --slowdown 3

Both strategies train on the same global batches, in turns, in the same processes. Each sample costs a pause, so that
results depend little on other load; with a slowdown of s the ideal speed-up is (1 + s) / 2. Steps in which
`balanced_ddp` still measures are included.
"""

import argparse
import os
import statistics
import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import BalancedDDPStrategy, DDPStrategy
from evener.trainer import Trainer


class Paused(pl.LightningModule):
    """A small regression with a pause per sample.

    Args:
        pause_s: seconds per sample on this rank.
    """

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.pause_s = pause_s
        self.parts: list[tuple[float, int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean squared error of this rank's chunk, recorded with its number of samples."""
        inputs, targets = batch
        time.sleep(self.pause_s * len(inputs))
        loss = (self.net(inputs) - targets).square().mean()
        self.parts.append((loss.item(), len(inputs)))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def losses(module: Paused) -> list[float]:
    """The loss of every global batch: the mean over ranks, weighted by samples."""
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, module.parts)
    return [
        sum(loss * num for loss, num in step) / sum(num for _, num in step) for step in zip(*everything, strict=True)
    ]


def train(strategy: DDPStrategy, options: argparse.Namespace, pause_s: float) -> tuple[float, list[float]]:
    """Train once.

    Returns:
        Samples per second over all steps, and the losses.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(options.steps * options.batch, 8, generator=generator)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), options.batch)
    module = Paused(pause_s)
    trainer = Trainer(
        strategy=strategy, devices=2, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    clock = Clock()
    trainer.callbacks.append(clock)
    trainer.fit(module, loader)
    return options.steps * options.batch / clock.seconds, losses(module)


class Clock(pl.Callback):
    """Seconds from the first step to the last."""

    def on_train_start(self, *_: Any) -> None:
        """Start."""
        self.start_s = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        """Stop."""
        self.seconds = time.perf_counter() - self.start_s


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slowdown", type=float, default=3.0, help="slowdown factor of rank 1, per sample")
    parser.add_argument("--pause-ms", type=float, default=2.0, help="milliseconds per sample on rank 0")
    parser.add_argument("--batch", type=int, default=32, help="samples of a global batch")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    pause_s = options.pause_ms / 1000 * (options.slowdown if rank else 1.0)
    speeds: dict[str, list[float]] = {"ddp": [], "balanced_ddp": []}
    curves: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name in speeds:
            strategy = DDPStrategy(batch_size_is="global") if name == "ddp" else BalancedDDPStrategy("auto")
            speed, curves[name] = train(strategy, options, pause_s)
            speeds[name].append(speed)
    if rank:
        return
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    difference = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    for name, values in speeds.items():
        print(f"{name:13} {medians[name]:8.1f} samples/s   ({', '.join(f'{value:.1f}' for value in values)})")
    ratio, ideal = medians["balanced_ddp"] / medians["ddp"], (1 + options.slowdown) / 2
    print(f"ratio {ratio:.2f} (ideal {ideal:.2f}); largest difference of the loss curves {difference:.1e}")


if __name__ == "__main__":
    main()
