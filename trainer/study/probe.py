"""Measure a short training run: losses, speed, memory, and sources of differences between strategies."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import override

from ...strategies.batch.losses import loss_weight
from ...strategies.batch.structure import num_samples
from ...strategies.core.devices import is_accelerator
from ...strategies.core.rng import generator_state
from ...strategies.distributed.sync_batchnorm import SyncedBatchNorm
from ...strategies.registry import process_devices
from ..callbacks.device_monitor import peak_bytes

WINDOW = 3
"""Number of batches between two readings of the clock."""


@dataclass
class RankRecord:
    """The measurements of one process.

    Args:
        losses: mean loss of this process's part of every batch; empty if `training_step` returned none.
        weights: weight of each loss, in samples or as given by the module.
        first_batch: samples of this process's part of the first batch.
        windows: samples and seconds of each measured window of `WINDOW` batches.
        memory: peak bytes by device; on the CPU by process.
        num_batchnorms: BatchNorm layers whose statistics cover this process's chunk only.
        num_dropouts: dropout layers with a positive rate.
        draws: whether the first training step drew random numbers.
    """

    losses: list[float] = field(default_factory=list[float])
    weights: list[float] = field(default_factory=list[float])
    first_batch: int = 0
    windows: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    memory: dict[str, int] = field(default_factory=dict[str, int])
    num_batchnorms: int = 0
    num_dropouts: int = 0
    draws: bool = False


class Probe(pl.Callback):
    """Record a training run, and write `rank<r>.json` at its end.

    Time is measured over windows of `WINDOW` batches within an epoch, so that neither the first batches nor the start
    of an epoch count, and a temporary load on the machine affects one window. Accelerators are synchronized only
    between windows. Losses are read after training; no collective is added.

    Args:
        warmup_steps: batches before the measurement starts.
    """

    def __init__(self, folder: str, warmup_steps: int) -> None:
        self._folder = Path(folder)
        self._warmup = warmup_steps
        self._record = RankRecord()
        self._kept: list[tuple[Any, Any]] = []
        self._num_batches = 0
        self._since: float | None = None
        self._window = (0, 0)
        self._streams: list[Tensor] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        modules = list(pl_module.modules())
        self._record.num_batchnorms = sum(isinstance(m, _BatchNorm) and not is_synced(m) for m in modules)
        self._record.num_dropouts = sum(isinstance(m, _DropoutNd) and m.p > 0 for m in modules)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._num_batches == 0:
            self._streams = random_streams(process_devices(trainer.strategy))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        devices = process_devices(trainer.strategy)
        weight = loss_weight(outputs, batch)
        count = 0 if isinstance(weight, float) and not weight else num_samples(batch) or 0
        if self._num_batches == 0:
            self._record.first_batch = count
            streams = zip(self._streams, random_streams(devices), strict=True)
            self._record.draws = not all(torch.equal(before, after) for before, after in streams)
        self._num_batches += 1
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._kept.append((loss.detach().clone(), weight))
        self._run_clock(count, devices)

    def _run_clock(self, count: int, devices: list[torch.device]) -> None:
        samples, batches = self._window
        self._window = (samples + count, batches + 1)
        if self._since is not None and batches + 1 == WINDOW:
            now = synchronized_time(devices)
            self._record.windows.append((samples + count, now - self._since))
            self._since, self._window = now, (0, 0)
        elif self._since is None and self._num_batches >= self._warmup:
            self._since, self._window = synchronized_time(devices), (0, 0)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        record = self._record
        record.losses = [float(loss) for loss, _ in self._kept]
        record.weights = [float(weight) for _, weight in self._kept]
        record.memory = {
            f"process {trainer.global_rank}" if device.type == "cpu" else str(device): peak_bytes(device)
            for device in process_devices(trainer.strategy)
        }
        (self._folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(asdict(record)), encoding="utf-8")


def read_records(folder: Path) -> list[RankRecord]:
    """Read the records of a run's processes, by rank."""
    files = sorted(folder.glob("rank*.json"), key=lambda file: int(file.stem.removeprefix("rank")))
    return [RankRecord(**json.loads(file.read_text(encoding="utf-8"))) for file in files]


def is_synced(module: nn.Module) -> bool:
    """Whether a normalization layer computes its statistics over all processes."""
    return isinstance(module, (nn.SyncBatchNorm, SyncedBatchNorm))


def random_streams(devices: list[torch.device]) -> list[Tensor]:
    """The states of torch's random streams that a step on these devices may draw from."""
    return [generator_state(device) for device in dict.fromkeys([torch.device("cpu"), *devices])]


def synchronized_time(devices: list[torch.device]) -> float:
    """Synchronize the devices, and return the time in seconds."""
    for device in {device for device in devices if is_accelerator(device)}:
        torch.accelerator.synchronize(device)
    return time.perf_counter()
