"""Measure a short training run: its losses, its speed, and why another strategy's losses may differ."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import override

from ...strategies.batch.losses import loss_weight
from ...strategies.core.devices import is_accelerator, precise_dtype
from ...strategies.core.rng import generator_state
from ...strategies.distributed.sync_batchnorm import SyncedBatchNorm
from ...strategies.registry import process_devices
from ..callbacks import RunSummary

PROBE_FILE = "probe.json"

WINDOW = 3
"""Number of batches between two readings of the clock."""

DRAWS = "the training step draws random numbers, which differ between strategies"


class Probe(pl.Callback):
    """Record a training run, and write `probe.json` at its end: `losses`, `samples_per_s`, `spread` and `excuses`.

    Time is measured over windows of `WINDOW` batches within an epoch, so that neither the first batches nor the start
    of an epoch count, and a temporary load on the machine affects one window. Accelerators are synchronized only
    between windows. Losses are combined after training; no collective is added to a step.

    Args:
        folder: where the file is written.
        warmup_steps: batches before the measurement starts.
    """

    def __init__(self, folder: str, warmup_steps: int) -> None:
        self._file = Path(folder) / PROBE_FILE
        self._warmup = warmup_steps
        self._losses: list[tuple[Tensor, Any]] = []
        self._excuses: list[str] = []
        self._rates: list[float] = []
        self._num_batches = 0
        self._window: int | None = None
        self._streams: list[Tensor] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        modules = list(pl_module.modules())
        if num := sum(isinstance(m, _BatchNorm) and not is_synced(m) for m in modules):
            self._excuses.append(f"{num} BatchNorm layers normalize chunk by chunk (no sync_batchnorm)")
        if num := sum(isinstance(m, _DropoutNd) and m.p > 0 for m in modules):
            self._excuses.append(f"{num} dropout layers draw different random numbers")

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._num_batches == 0:
            self._streams = random_streams(process_devices(trainer.strategy))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        devices = process_devices(trainer.strategy)
        if self._num_batches == 0 and not any("dropout" in excuse for excuse in self._excuses):
            streams = zip(self._streams, random_streams(devices), strict=True)
            self._excuses += [] if all(torch.equal(before, after) for before, after in streams) else [DRAWS]
        self._num_batches += 1
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append((loss.detach().clone(), loss_weight(outputs, batch)))
        if self._window is not None:
            self._window += 1
        if self._window == WINDOW or (self._window is None and self._num_batches >= self._warmup):
            self._read_clock(trainer, devices)

    def _read_clock(self, trainer: pl.Trainer, devices: list[torch.device]) -> None:
        """Begin a window, and keep the rate of the one that ends."""
        summary = RunSummary.of(trainer)
        assert summary is not None
        for device in filter(is_accelerator, set(devices)):
            torch.accelerator.synchronize(device)
        times = summary.clock.read(WINDOW)
        if times is not None and self._window is not None:
            self._rates.append(times.samples_per_s)
        self._window = 0

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._window = None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        # a rank without samples has zero weight, whatever its loss is
        parts = [[float(loss) * float(weight) if weight else 0.0, float(weight)] for loss, weight in self._losses]
        sums: Any = torch.tensor(parts, dtype=precise_dtype(device), device=device)
        if parts:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
        losses = [loss / (weight or 1.0) for loss, weight in sums.tolist()]
        speed, spread = median_rate(self._rates)
        found = {"losses": losses, "samples_per_s": speed, "spread": spread}
        if trainer.is_global_zero:
            self._file.write_text(json.dumps({**found, "excuses": self._excuses}), encoding="utf-8")


def median_rate(rates: list[float]) -> tuple[float, float]:
    """The median, and half the range of the middle half relative to it; 0 if training was too short."""
    if len(rates) < 2:
        return sum(rates), 0.0
    low, median, high = statistics.quantiles(rates, n=4, method="inclusive")
    return median, (high - low) / 2 / median


def is_synced(module: nn.Module) -> bool:
    """Whether a normalization layer computes its statistics over all processes."""
    return isinstance(module, (nn.SyncBatchNorm, SyncedBatchNorm))


def random_streams(devices: list[torch.device]) -> list[Tensor]:
    """The states of torch's random streams that a step on these devices may draw from."""
    return [generator_state(device) for device in dict.fromkeys([torch.device("cpu"), *devices])]
