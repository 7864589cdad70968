"""Measure the speed-up of a training step on two stages with m micro-batches, compared with the ideal.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --wait
    python benchmarks/pipeline.py --devices cuda:0,cpu

Two equal stages of wide linear layers, one intra-op thread each, so that a stage is compute-bound: each micro-batch
reads all weights and adds to all gradients once, so a small batch (`--batch 512`) is memory-bound and gains little.
All variants run interleaved in one process, round by round; the table shows medians over the rounds. Two CPU stages
need two free cores: the last line shows the speed-up of two independent threads over one at the same time, an upper
bound for any pipeline. With `--wait` a stage waits 20 µs per sample instead of computing, forward and backward, which
measures the schedule alone, independent of other load.
"""

import argparse
import logging
import os
import statistics
import threading
import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from evener.strategies import ModelParallelStrategy

WAIT_S = 20e-6
"""Seconds per sample and stage that `--wait` takes, in each direction."""


class Waiting(torch.autograd.Function):
    """The identity, with a delay in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Wait, and return the input."""
        time.sleep(WAIT_S * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Wait, and return the gradient."""
        time.sleep(WAIT_S * len(grads[0]))
        return grads[0]


class WaitingStage(nn.Module):
    """A stage that only waits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Scale by a parameter, so that there is a gradient."""
        return Waiting.apply(x * self.scale)


class Wide(pl.LightningModule):
    """Equal layers, half of them on each of two stages; or two stages that wait."""

    def __init__(self, width: int, depth: int, wait: bool = False) -> None:
        super().__init__()
        if wait:
            self.layers = nn.Sequential(WaitingStage(), WaitingStage())
        else:
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean square of the output."""
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD, so that nearly all time is in forward and backward."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class StepTimes(pl.Callback):
    """Seconds of each training step."""

    def __init__(self, devices: list[torch.device]) -> None:
        self.seconds: list[float] = []
        self._devices = [device for device in devices if device.type == "cuda"]
        self._start = 0.0

    def _now(self) -> float:
        for device in self._devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self._start = self._now()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop the clock."""
        self.seconds.append(self._now() - self._start)


def ideal_speedup(num_microbatches: int, num_stages: int) -> float:
    """Speedup of the schedule over one micro-batch, if stages are equal and nothing else takes time.

    One after the other, m micro-batches on k stages take m·k ticks in each direction; the schedule takes m + k − 1.

    Returns:
        m·k / (m + k − 1): 1.0 for one micro-batch or one stage, towards k for many micro-batches.
    """
    return num_microbatches * num_stages / (num_microbatches + num_stages - 1)


def step_seconds(devices: list[torch.device], num_microbatches: int, args: argparse.Namespace) -> float:
    """Median time of a training step."""
    torch.manual_seed(0)
    times = StepTimes(devices)
    trainer = pl.Trainer(
        strategy=ModelParallelStrategy(devices=devices, num_microbatches=num_microbatches, optimizer_copies=0),
        accelerator="cuda" if devices[0].type == "cuda" else "cpu",
        devices=1 if devices[0].type == "cuda" else len(devices),
        max_steps=args.steps,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    width = 1 if args.wait else args.width
    batches = [torch.randn(args.batch, width)] * args.steps
    trainer.fit(Wide(width, args.depth, args.wait), torch.utils.data.DataLoader(batches, batch_size=None))
    return statistics.median(times.seconds[1:])


def threads_speedup(args: argparse.Namespace) -> float:
    """Speed-up of two threads with half a batch each over one thread with all of it, forward and backward."""
    layers = Wide(args.width, args.depth).layers
    batch = torch.randn(args.batch, args.width)

    def seconds(parts: int) -> float:
        threads = [
            threading.Thread(target=lambda part: torch.autograd.grad(layers(part).sum(), layers.parameters()), args=[p])
            for p in batch.chunk(parts)
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    return statistics.median(seconds(1) / seconds(2) for _ in range(args.steps))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--devices", default="cpu,cpu")
    parser.add_argument("--microbatches", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    devices = [torch.device(name) for name in args.devices.split(",")]
    counts = [int(count) for count in args.microbatches.split(",")]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, devices {args.devices}")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    limits: list[float] = []
    for _ in range(args.rounds):
        for count in counts:
            seconds[count].append(step_seconds(devices, count, args))
        limits.append(threads_speedup(args))
    print("micro-batches  ms/step  speed-up  best round  ideal m·k/(m+k−1)")
    for count in counts:
        ratios = [one / many for one, many in zip(seconds[counts[0]], seconds[count], strict=True)]
        median = statistics.median(seconds[count])
        ideal = ideal_speedup(count, len(devices))
        print(f"{count:13d}{median * 1e3:9.1f}{statistics.median(ratios):10.2f}{max(ratios):12.2f}{ideal:12.2f}")
    if not args.wait:
        print(f"two independent threads: {statistics.median(limits):.2f}, best round {max(limits):.2f}")


if __name__ == "__main__":
    main()
