"""Compare replicas with one device, and with nn.DataParallel on a GPU, and count copied parameters.

    python benchmarks/data_parallel.py

    (a) a training step of two CPU replicas and of one device, dominated by computation
    (b) number of parameters copied in evaluation and in accumulation steps
    (c) with a GPU: [cuda:0, cuda:0] and nn.DataParallel(device_ids=[0, 0]); [cuda:0, cpu]; peak memory of the root

All variants run interleaved in one process, round by round, on one intra-op thread; the table shows medians and the
quartiles of the rounds' ratios.
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
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
from evener.strategies.batch.policies import Even
from evener.strategies.batch.results import chunk_losses
from evener.strategies.batch.structure import BatchStructure
from evener.strategies.replicas.runner import ReplicaRunner
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


def interleaved(variants: dict[str, Callable[[], None]], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of every variant in each round."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for run_once in variants.values():
        run_once()
    for _ in range(rounds):
        for name, run_once in variants.items():
            start = time.perf_counter()
            for _ in range(steps):
                run_once()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            found[name].append((time.perf_counter() - start) / steps)
    return found


def report(seconds: dict[str, list[float]], first: str, second: str) -> None:
    """Print the medians of both variants, and the median ratio."""
    ratios = sorted(a / b for a, b in zip(seconds[first], seconds[second], strict=True))
    low, middle, high = ratios[len(ratios) // 4], statistics.median(ratios), ratios[-len(ratios) // 4]
    for name in (first, second):
        print(f"    {name:44s} {statistics.median(seconds[name]) * 1e3:9.3f} ms a step")
    print(f"    {first} / {second}: {middle:.2f} (quartiles {low:.2f} to {high:.2f})\n")


def persistent_step(module: Mlp, batch: Any, devices: list[torch.device]) -> Callable[[], None]:
    """A step like that of `DataParallelStrategy`."""
    layout, optimizer = ReplicaRunner(module, devices), module.configure_optimizers()

    def step() -> None:
        sizes = Even().sizes(len(batch[0]), len(devices))
        chunks = BatchStructure().split(batch, sizes)
        outputs = layout.run("training_step", [((chunk,), {}) for chunk in chunks], sizes)
        optimizer.zero_grad()
        layout.attach(chunk_losses(outputs, sizes, "dp").combine(devices[0])).backward()
        optimizer.step()
        layout.replicas.mark_changed()

    return step


def torch_step(module: Mlp, batch: Any) -> Callable[[], None]:
    """A step of torch's nn.DataParallel on one GPU given twice."""
    parallel, optimizer = nn.DataParallel(module, device_ids=[0, 0]), module.configure_optimizers()

    def step() -> None:
        optimizer.zero_grad()
        parallel(batch[0]).mean().backward()
        optimizer.step()

    return step


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


def counted_copies() -> None:
    """(b)."""
    print("(b) parameters copied to 1 other device, of 8 parameters, in 12 batches with accumulate_grad_batches=4")
    counts: list[int] = []

    class Count(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            counts.append(trainer.strategy.layout.runner.replicas.num_copied_parameters)

        on_validation_batch_end = on_train_batch_end

    loader = DataLoader(TensorDataset(torch.randn(48, 16)), batch_size=4)
    options = {"accumulate_grad_batches": 4, "num_sanity_val_steps": 0, "callbacks": [Count()]}
    make_trainer("dp", devices=2, **options).fit(Mlp(4, 16), loader, loader)
    copied = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    print(f"    training batches   {copied[:12]}\n    validation batches {copied[12:]}\n")


def on_gpu(args: argparse.Namespace) -> None:
    """(c)."""
    gpu = torch.device("cuda", 0)
    batch = (torch.randn(8, 16, device=gpu),)
    print(f"(c) {args.layers} layers of width 16, batch of 8 on [cuda:0, cuda:0]")
    modules = [Mlp(args.layers, 16).to(gpu) for _ in range(2)]
    variants = {
        "nn.DataParallel": torch_step(modules[0], batch),
        "persistent replicas": persistent_step(modules[1], batch, [gpu, gpu]),
    }
    report(interleaved(variants, args.rounds, 5), "nn.DataParallel", "persistent replicas")
    for name, policy in (("even", {"weights": [1, 1]}), ("gpu0_chunk=8", {"gpu0_chunk": 8})):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(gpu)
        loader = DataLoader(TensorDataset(torch.randn(1024, 512)), batch_size=256)
        clock = StepSeconds()
        strategy = BalancedDataParallelStrategy(devices=["cuda:0", "cpu"], **policy)
        trainer = make_trainer(strategy, accelerator="cuda", devices=1, callbacks=[clock], limit_val_batches=0)
        trainer.fit(Mlp(16, 512), loader, loader)
        peak = torch.cuda.max_memory_allocated(gpu) / 2**20
        step_ms = statistics.median(clock.seconds[1:]) * 1e3
        print(f"    [cuda:0, cpu], {name:14s} {step_ms:9.3f} ms a step, peak memory of cuda:0 {peak:8.1f} MiB")


def main() -> None:
    """Run all parts that this machine supports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=200, help="layers of (c)")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    for batch_size in (256, 1024):
        compute_bound(args, batch_size)
    counted_copies()
    if torch.cuda.is_available():
        on_gpu(args)
    else:
        print("(c) not run: this machine has no GPU")


if __name__ == "__main__":
    main()
