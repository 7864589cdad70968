"""Count the bytes that each strategy sends in a training step.

    python benchmarks/communication.py

    dp              parameters sent from the root to the replicas, and gradients sent back: bytes of the transferred
                    tensors, on repeated CPU devices
    ddp             bytes that each rank receives over its TCP connections (gloo), as counted by the kernel
    model_parallel  activations and their gradients that pass from stage to stage

The module is a stack of linear layers in float32. One line per strategy and number of devices k; the last column is the
result of the formula: of P bytes on k devices dp sends 2 (k - 1) P, and a rank of ddp receives 2 P (k - 1) / k.
"""

import argparse
import logging
import os
import socket
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import DataParallelStrategy, DDPStrategy, ModelParallelStrategy
from evener.strategies.pipeline.stages import Stages
from evener.strategies.replicas import _parameter_copies as copies_room
from evener.strategies.replicas import replicas as replicas_room
from evener.trainer import Trainer

WIDTH, NUM_LAYERS, NUM_SAMPLES = 256, 16, 32
FIRST, LAST = 2, 6
"""The step after which counting starts (the first steps include set-up), and the last step."""
BYTES_RECEIVED = 128
"""Offset of `tcpi_bytes_received`, an unsigned integer of 8 bytes, in Linux's `struct tcp_info`."""


class Stack(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Count(pl.Callback):
    """Counts bytes per step; each rank writes its count to a file.

    Args:
        read: returns the total bytes so far.
        folder: directory of the files.
    """

    def __init__(self, read: Callable[[], int], folder: str) -> None:
        self._read = read
        self._folder = folder
        self._before = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == FIRST:
            self._before = self._read()
        if trainer.global_step == LAST:
            per_step = (self._read() - self._before) / (LAST - FIRST)
            Path(self._folder, str(trainer.global_rank)).write_text(str(per_step), encoding="utf-8")


def bytes_received() -> int:
    """Bytes received over all TCP connections of this process."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    total += struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
        except OSError:  # closed since, or listening
            continue
    return total


class Sum:
    """Sums the bytes of tensors."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self) -> int:
        return self.bytes

    def add(self, tensors: Iterable[Tensor]) -> None:
        self.bytes += sum(tensor.nbytes for tensor in tensors)


def fit(strategy: Any, devices: int, read: Callable[[], int]) -> list[float]:
    """Bytes per step, by rank."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(NUM_SAMPLES * LAST * 4, WIDTH))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            strategy=strategy, devices=devices, accelerator="cpu", max_steps=LAST, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[Count(read, folder)],
        )  # fmt: skip
        trainer.fit(Stack(), DataLoader(data, NUM_SAMPLES))
        return [float(file.read_text(encoding="utf-8")) for file in sorted(Path(folder).iterdir())]


def of_dp(num_devices: int) -> float:
    total = Sum()
    copy, add = replicas_room.write, copies_room._add

    def counted_copy(sources: Any, targets: Any, *rest: Any) -> None:
        for _ in targets:
            total.add(sources)
        copy(sources, targets, *rest)

    def counted_add(sums: Any, gradients: Sequence[Tensor | None], *rest: Any) -> None:
        total.add(one for one in gradients if one is not None)
        add(sums, gradients, *rest)

    with (
        patch.object(replicas_room, "write", counted_copy),
        patch.object(copies_room, "_add", counted_add),
    ):
        return fit(DataParallelStrategy(), num_devices, total)[0]


def of_stages(num_devices: int) -> float:
    total = Sum()
    move = Stages._move
    where = num_devices - 1  # the batch is on the last stage's device, where outputs meet

    def counted_move(self: Stages, stage: int, tensors: list[Tensor]) -> list[Tensor]:
        nonlocal where
        if stage != where:
            total.add(tensors)
            total.add(tensor for tensor in tensors if tensor.requires_grad)  # its gradient is sent back
        where = stage
        return move(self, stage, tensors)

    with patch.object(Stages, "_move", counted_move):
        return fit(ModelParallelStrategy(deterministic=True), num_devices, total)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 3, 4])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    size = 4 * WIDTH * WIDTH * NUM_LAYERS
    activation = 4 * WIDTH * NUM_SAMPLES
    print(f"parameters: {size:,} bytes; one activation of {NUM_SAMPLES} samples: {activation:,} bytes")
    print(f"{'strategy':16}{'k':>3}{'counted per step':>20}{'formula':>14}")
    for k in parser.parse_args().devices:
        ranks = fit(DDPStrategy(timeout_s=60), k, bytes_received)
        rows = [
            ("dp (root)", of_dp(k), 2 * (k - 1) * size),
            ("ddp (each rank)", max(ranks), 2 * (k - 1) / k * size),
            ("model_parallel", of_stages(k), activation + 2 * (k - 1) * activation),
        ]
        for name, counted, formula in rows:
            print(f"{name:16}{k:>3}{counted:>20,.0f}{formula:>14,.0f}")


if __name__ == "__main__":
    main()
