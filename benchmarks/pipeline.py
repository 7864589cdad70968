"""Measure the speed-up of a training step on k stages with m micro-batches, compared with the ideal.

    python benchmarks/pipeline.py --devices cuda:0,cuda:1
    python benchmarks/pipeline.py --wait
    python benchmarks/pipeline.py --wait --microbatches 8,32 --wait_us 80
    python benchmarks/pipeline.py --wait --devices cpu,cpu,cpu,cpu --microbatches 1,2,4,8,16,32
    python benchmarks/pipeline.py --wait --schedule gpipe
    python benchmarks/pipeline.py --uneven --rounds 3
    python benchmarks/pipeline.py --devices cuda:0,cpu

Equal stages of wide linear layers, one intra-op thread each, so that a stage is compute-bound: each micro-batch
reads all weights and adds to all gradients once, so a small batch (`--batch 512`) is memory-bound and gains little.
Stages on CPUs work one after the other, so that they show what micro-batches cost, and no speed-up.
All variants run interleaved in one process, round by round; the table shows medians over the rounds. Two CPU stages
need two free cores: the last line shows the speed-up of two independent threads over one at the same time, an upper
bound for any pipeline. With `--wait` a stage waits `--wait_us` per sample and direction instead of computing, which
measures the schedule alone, independent of other load. `by hand` is a thread per stage with two queues and nothing
else around the same operations.

With `--uneven` parts of equal bytes wait on four stages, those of the first stage three times as long, and
`balance=time` is compared with `balance=memory`. With `--best` the fastest step of a run counts, not the median: what
else the machine does only adds time.
"""

import argparse
import ctypes
import logging
import os
import queue
import statistics
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from evener.strategies import ModelParallelStrategy

UNEVEN = [0.75] * 4 + [0.25] * 12
"""Four stages of four parts, the first of which takes three times as long: 3 1 1 1; of equal time they are 1.5 each."""

_FIRST = 5
"""The first step that counts: until then `balance=time` measures."""


class Waiting(torch.autograd.Function):
    """The identity, with a delay in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wait_s: float) -> Tensor:
        """Wait so long for each sample, and return the input."""
        ctx.seconds = wait_s * len(x)
        time.sleep(ctx.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Wait, and return the gradient."""
        time.sleep(ctx.seconds)
        return grads[0], None


class WaitingStage(nn.Module):
    """A stage, or a part of one, that only waits."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.wait_s = wait_s
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Scale by a parameter, so that there is a gradient."""
        return Waiting.apply(x * self.scale, self.wait_s)


class Wide(pl.LightningModule):
    """Equal layers; or stages that wait."""

    def __init__(self, width: int, depth: int, waits: Sequence[float] = ()) -> None:
        super().__init__()
        if waits:
            self.layers = nn.Sequential(*map(WaitingStage, waits))
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


def step_seconds(devices: list[torch.device], num_microbatches: int, args: argparse.Namespace, **options: Any) -> float:
    """Median time of a training step, the least one with `--best`."""
    torch.manual_seed(0)
    times = StepTimes(devices)
    trainer = pl.Trainer(
        strategy=ModelParallelStrategy(
            devices=devices, num_microbatches=num_microbatches, optimizer_copies=0, **options
        ),
        accelerator="cuda" if devices[0].type == "cuda" else "cpu",
        devices=1 if devices[0].type == "cuda" else len(devices),
        max_steps=args.steps,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    width, waits = layers_of(args, len(devices))
    batches = [torch.randn(args.batch, width)] * args.steps
    trainer.fit(Wide(width, args.depth, waits), torch.utils.data.DataLoader(batches, batch_size=None))
    later = times.seconds[min(_FIRST, len(times.seconds) - 1) :]
    return min(later) if args.best else statistics.median(later)


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


def layers_of(args: argparse.Namespace, num_stages: int) -> tuple[int, list[float]]:
    """The width of a layer, and the seconds per sample that each one waits; none if they compute."""
    parts = UNEVEN if args.uneven else [1.0] * num_stages if args.wait else []
    return 1 if parts else args.width, [part * args.wait_us * 1e-6 for part in parts]


def by_hand_seconds(sizes: Sequence[int], num_microbatches: int, args: argparse.Namespace) -> float:
    """Median time of forward and backward passes by 1F1B, in a thread per stage that does nothing else.

    Args:
        sizes: number of layers per stage.
    """
    width, waits = layers_of(args, len(sizes))
    layers = Wide(width, args.depth, waits).layers
    stages = [layers[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    chunks = torch.randn(args.batch, width).chunk(num_microbatches)
    forth, back = ([queue.SimpleQueue[Tensor]() for _ in stages] for _ in range(2))

    def work(index: int, is_last: bool) -> None:
        kept: deque[tuple[Tensor, Tensor]] = deque()
        ahead = len(stages) - index
        for i in range(num_microbatches + ahead):
            if i >= ahead:
                received, output = kept.popleft()
                output.backward(None if is_last else back[index].get())
                if index:
                    back[index - 1].put(received.grad)
            if i < num_microbatches:
                received = forth[index].get() if index else chunks[i]
                output = stages[index](received)
                kept.append((received, output.square().mean() / num_microbatches if is_last else output))
                if not is_last:
                    forth[index + 1].put(output.detach().requires_grad_())

    def step() -> float:
        threads = [threading.Thread(target=work, args=[i, i == len(stages) - 1]) for i in range(len(stages))]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    times = [step() for _ in range(args.steps)][1:]
    return min(times) if args.best else statistics.median(times)


def speedups(one: Sequence[float], many: Sequence[float]) -> list[float]:
    """The speed-up of each round."""
    return [before / after for before, after in zip(one, many, strict=True)]


def compare_balance(args: argparse.Namespace) -> None:
    """Print the time of a step with stages of equal bytes and of equal time, and of the same by hand."""
    devices = [torch.device("cpu")] * 4
    rounds = [
        [step_seconds(devices, 16, args, balance="memory"), step_seconds(devices, 16, args, balance="time")]
        + [by_hand_seconds(sizes, 16, args) for sizes in ([4, 4, 4, 4], [2, 2, 6, 6])]
        for _ in range(args.rounds)
    ]
    memory, by_time, *by_hand = (statistics.median(column) * 1e3 for column in zip(*rounds, strict=True))
    ratio, ratio_by_hand = (statistics.median(each[i] / each[i + 1] for each in rounds) for i in (0, 2))
    ideal = (3 * 16 + 3) / (1.5 * (16 + 3))  # m times the slowest stage, and once each of the others
    print(f"balance=memory {memory:.1f} ms/step, balance=time {by_time:.1f}: {ratio:.2f}, ideal {ideal:.2f}")
    print(f"by hand        {by_hand[0]:.1f} ms/step,              {by_hand[1]:.1f}: {ratio_by_hand:.2f}")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--wait_us", type=float, default=20.0, help="microseconds per sample and stage, each way")
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--schedule", default="1f1b", choices=["1f1b", "gpipe"])
    parser.add_argument("--devices", default="cpu,cpu")
    parser.add_argument("--microbatches", default="1,2,4,8,16,32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.platform == "linux":  # stages wait as long as they say, not 50 µs more: PR_SET_TIMERSLACK, in ns
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)
    devices = [torch.device(name) for name in args.devices.split(",")]
    counts = [int(count) for count in args.microbatches.split(",")]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, devices {args.devices}")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    if args.uneven:
        compare_balance(args)
        return
    seconds: dict[int, list[float]] = {count: [] for count in (1, *counts)}  # one, to compare with
    by_hand: dict[int, list[float]] = {count: [] for count in seconds}
    limits: list[float] = []
    for _ in range(args.rounds):
        for count in seconds:
            seconds[count].append(step_seconds(devices, count, args, schedule=args.schedule))
            if {device.type for device in devices} == {"cpu"}:
                sizes = [1 if args.wait else args.depth // len(devices)] * len(devices)
                by_hand[count].append(by_hand_seconds(sizes, count, args))
        if not args.wait:
            limits.append(threads_speedup(args))
    print("micro-batches  ms/step  speed-up  best round  ideal m·k/(m+k−1)  of it  by hand")
    for count, times in seconds.items():
        ratios, ideal = speedups(seconds[1], times), ideal_speedup(count, len(devices))
        print(
            f"{count:13d}{statistics.median(times) * 1e3:9.1f}{statistics.median(ratios):10.2f}{max(ratios):12.2f}"
            f"{ideal:19.2f}{statistics.median(ratios) / ideal:7.2f}"
            + (f"{statistics.median(speedups(by_hand[1], by_hand[count])):9.2f}" if by_hand[1] else "")
        )
    if not args.wait:
        print(f"two independent threads: {statistics.median(limits):.2f}, best round {max(limits):.2f}")


if __name__ == "__main__":
    main()
