"""Try one strategy: run a few steps of the user's training in a process of its own.

The run leaves its result, and what the probe has measured, in the trial's folder.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ...strategies import ConfigError
from ...strategies.batch.results import loss_weight
from ...strategies.core.devices import has_streams, precise_dtype
from ...strategies.core.rng import generator_state
from ...strategies.distributed.sync_batchnorm import SyncedBatchNorm
from ...strategies.registry import process_devices
from ..callbacks import RunSummary
from ..config.checks import LaunchPlan, verify_config
from ..job.result import FAILED, RESULT_FILE, Result, discard_result
from ..launch.launcher import can_fork, launch
from ..launch.worker import begin, starting

PROBE_FILE = "probe.json"

DRAWS = "the training step draws random numbers, which differ between strategies"


class Probe(pl.Callback):
    """Record a training run, and write `probe.json` at its end: `losses`, `samples_per_s` and `excuses`.

    Losses are combined after training; no collective is added to a step.

    Args:
        folder: where the file is written.
        warmup_steps: batches before the measurement starts.
    """

    def __init__(self, folder: str, warmup_steps: int) -> None:
        self._file = Path(folder) / PROBE_FILE
        self._warmup, self._num_batches = warmup_steps, 0
        self._losses: list[tuple[Tensor, Any]] = []
        self._excuses: list[str] = []
        self._streams: list[Tensor] = []
        self._rate = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        synced = (nn.SyncBatchNorm, SyncedBatchNorm)
        if num := sum(isinstance(m, _BatchNorm) and not isinstance(m, synced) for m in pl_module.modules()):
            self._excuses.append(f"{num} BatchNorm layers normalize chunk by chunk (no sync_batchnorm)")

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._num_batches == 0:
            self._streams = random_streams(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._num_batches == 0 and not all(map(torch.equal, self._streams, random_streams(trainer))):
            self._excuses.append(DRAWS)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append((loss.detach().clone(), loss_weight(outputs, batch)))
        self._num_batches += 1
        if self._num_batches == self._warmup or trainer.global_step >= trainer.max_steps:
            self._rate = self._speed(trainer)

    def _speed(self, trainer: pl.Trainer) -> float:
        """Samples per second of the run's clock since the last call; waits for the device."""
        for device in filter(has_streams, process_devices(trainer.strategy)):
            torch.accelerator.synchronize(device)
        summary = RunSummary.of(trainer)
        return 0.0 if summary is None else summary.clock.read(1).get("samples_per_s", 0.0)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        # a rank without samples has zero weight, whatever its loss is
        parts = [[float(loss) * float(weight) if weight else 0.0, float(weight)] for loss, weight in self._losses]
        sums: Any = torch.tensor(parts, dtype=precise_dtype(device), device=device)
        if parts:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
        losses = [loss / (weight or 1.0) for loss, weight in sums.tolist()]
        found = {"losses": losses, "samples_per_s": self._rate}
        if trainer.is_global_zero:
            self._file.write_text(json.dumps({**found, "excuses": self._excuses}), encoding="utf-8")


def random_streams(trainer: pl.Trainer) -> list[Tensor]:
    """The states of torch's random streams that a step of this process may draw from."""
    devices = dict.fromkeys([torch.device("cpu"), *process_devices(trainer.strategy)])
    return [generator_state(device) for device in devices]


OUTPUT_FILE = "output.log"
OK, REFUSED = "ok", "refused"


@dataclass(frozen=True)
class Trial:
    """The outcome of one strategy's trial; fields that a `Result` has, too, mean the same.

    Args:
        status: `ok`; `refused` if it can't train this module on these devices; `failed` if an error occurred.
        losses: loss of every global batch; empty if `training_step` returns none.
        samples_per_s: after the warm-up.
        excuses: known reasons for which its losses may differ from another strategy's.
    """

    strategy: str
    status: str = OK
    reason: str = ""
    losses: list[float] = field(default_factory=list[float])
    global_batch: int = 0
    samples_per_s: float = 0.0
    peak_memory_mib: list[float] = field(default_factory=list[float])
    num_processes: int = 1
    excuses: list[str] = field(default_factory=list[str])

    @property
    def peak_mib(self) -> float:
        """Largest peak of all devices, in MiB."""
        return max(self.peak_memory_mib, default=0.0)

    @classmethod
    def read(cls, folder: Path, strategy: str, ended: str) -> "Trial":
        """Read the outcome from a trial's folder; `ended` says how it ended if it has left none."""
        result = Result.read(folder) if (folder / RESULT_FILE).exists() else None
        if result is None or result.status == FAILED:
            if result is not None and result.refused:
                return cls(strategy, REFUSED, str(result.reason))
            return cls(strategy, FAILED, f"{result.reason if result else ended}; see {folder / OUTPUT_FILE}")
        if result.global_batch is None:
            return cls(strategy, FAILED, "it ran no training step")
        of_run = {"global_batch": result.global_batch, "num_processes": result.num_processes}
        measured = json.loads((folder / PROBE_FILE).read_text(encoding="utf-8"))
        return cls(strategy, peak_memory_mib=result.peak_memory_mib, **of_run, **measured)


def run_trial(cfg: DictConfig, strategy: str, timeout_s: float) -> Trial:
    """Run a configuration, which has a probe among its callbacks, in a process of its own, at most `timeout_s` s."""
    try:
        verify_config(cfg)
        plan = LaunchPlan.of(cfg)
    except ConfigError as exc:
        return Trial(strategy, REFUSED, str(exc))
    folder = Path(cfg.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    discard_result(folder)
    with starting(can_fork(plan)) as context:
        process = context.Process(target=execute, args=(cfg, folder / OUTPUT_FILE))
        process.start()
    try:
        process.join(timeout_s)
    finally:
        if (status := process.exitcode) is None:
            process.kill()  # its workers end with it
            process.join()
    if status is None:
        return Trial(strategy, FAILED, f"it did not finish within compare.timeout_s={timeout_s:g} seconds")
    return Trial.read(folder, strategy, f"its process ended with status {status}")


def execute(cfg: DictConfig, output: Path) -> None:
    """Run a trial's configuration in this process and its workers; what they print goes to a file."""
    sys.stdout = sys.stderr = output.open("w", encoding="utf-8", errors="backslashreplace", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    begin()
    launch(cfg)
