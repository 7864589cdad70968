"""Measure what ranks of stages gain by reducing gradients while the last micro-batch goes backward.

    torchrun --nproc-per-node=2 benchmarks/reduction.py

Two ranks of two stages, which wait instead of computing (20 µs per sample and direction), and between the ranks a link
that takes `--link-ms` for the gradients of each stage, one after the other.

With m micro-batches a stage works t = 20 µs · samples / m at a time. A step takes 2·(m + 1)·t, and 2·L for the link;
where the first half of that overlaps, L + max(0, L − t).
"""

import argparse
import logging
import os
import statistics
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pipeline import StepTimes, Wide
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.utils.data import DataLoader

from evener.strategies import DDPModelParallelStrategy
from evener.trainer import Trainer

_FIRST = 3
"""The first step that counts."""

WAIT_S = 20e-6
"""Seconds per sample and stage, in each direction."""


class SlowLink(pl.Callback):
    """Sends one bucket at a time, each in the same time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._link = ThreadPoolExecutor(1)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the wrapper send by this link."""
        wrapper: Any = trainer.strategy.model
        wrapper.register_comm_hook(self, SlowLink.send)

    def send(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin to send a bucket."""
        future: Future[Tensor] = Future()
        self._link.submit(self._send, bucket.buffer(), future)
        return future

    def _send(self, buffer: Tensor, future: Future[Tensor]) -> None:
        time.sleep(self.seconds)
        dist.all_reduce(buffer.div_(dist.get_world_size()))
        future.set_result(buffer)


def step_ms(link: SlowLink, num_microbatches: int, args: argparse.Namespace) -> float:
    """Median time of a training step."""
    times = StepTimes([])
    trainer = Trainer(
        strategy=DDPModelParallelStrategy(num_microbatches=num_microbatches, bucket_cap_mb=1e-6, timeout_s=60),
        accelerator="cpu", devices=4, max_steps=args.steps, callbacks=[times, link], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches = torch.ones(2 * args.batch * args.steps, 1)
    trainer.fit(Wide(1, 0, [WAIT_S, WAIT_S]), DataLoader(list(batches), args.batch))
    return statistics.median(times.seconds[_FIRST:]) * 1e3


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", default="2,4,8")
    parser.add_argument("--link-ms", type=float, default=10.0)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    link_ms = args.link_ms
    rows: list[str] = []
    for count in map(int, args.microbatches.split(",")):
        found = statistics.median(step_ms(SlowLink(link_ms / 1e3), count, args) for _ in range(args.rounds))
        tick_ms = WAIT_S * args.batch / count * 1e3
        ideal = 2 * (count + 1) * tick_ms + 2 * link_ms, 2 * (count + 1) * tick_ms + link_ms + max(0, link_ms - tick_ms)
        rows.append(f"{count:13d}{found:9.1f}{ideal[0]:14.1f}{ideal[1]:9.1f}")
    if os.environ["RANK"] == "0":
        print(f"ms/step, load {os.getloadavg()[0]:.1f}, a link of {link_ms:g} ms per stage")
        print("micro-batches  found  ideal: at end    early")
        print("\n".join(rows))


if __name__ == "__main__":
    main()
