"""Log each device's share of the batch, its time and its memory; that of the CPU is the process's resident size."""

import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import Strategy
from typing_extensions import override

from ...strategies.core.devices import peak_memory_bytes, precise_dtype, reset_peak_memory_bytes
from ...strategies.registry import process_devices
from .batch_layout import global_sizes
from .step_times import DDPTimes

MIB = 2**20


class DeviceMonitor(pl.Callback):
    """Log memory, batch share and time of every device of every process after each training epoch.

    Devices are numbered over all processes (`partition` in TensorBoard's TEXT tab lists them).

    - `device/peak_memory_mib_<i>`: on accelerators the memory of tensors (`torch.cuda.max_memory_allocated`), on the
      CPU the process's largest resident size, the same for all devices of a process.
    - `balance/share_<i>`: the device's fraction of a full batch, if batches are cut among devices.
    - `balance/time_s_<i>`, `balance/efficiency`: under DDP, seconds of the rank's own forward and backward pass in the
      last step that torch sampled, and their mean divided by their maximum. Strategies that measure devices themselves
      log these during training.
    """

    def __init__(self) -> None:
        self._ddp_times: DDPTimes | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._ddp_times = DDPTimes.of(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        memory = gather_peak_memory_mib(trainer.strategy)
        values = {f"device/peak_memory_mib_{i}": value for i, value in enumerate(memory)}
        if not any(name.startswith("balance/") for name in trainer.logged_metrics):
            values |= shares(trainer)
            if self._ddp_times is not None:
                values |= rank_times(trainer.strategy, self._ddp_times.own_compute_s())
        for logger in trainer.loggers:
            logger.log_metrics(values, step=max(0, trainer.fit_loop.epoch_loop._batches_that_stepped - 1))


def shares(trainer: pl.Trainer) -> dict[str, float]:
    """The fraction of a full batch that each device gets by the strategy's policy; empty if the batch is not cut."""
    sizes, _ = global_sizes(trainer)
    return {f"balance/share_{i}": size / sum(sizes) for i, size in enumerate(sizes)} if len(sizes) > 1 else {}


def rank_times(strategy: Strategy, own_s: float | None) -> dict[str, float]:
    """Seconds per rank, and their mean divided by their maximum; every rank must call it."""
    seconds = gather(strategy, [own_s or 0.0])
    if not all(seconds):
        return {}
    times = {f"balance/time_s_{i}": value for i, value in enumerate(seconds)}
    return {**times, "balance/efficiency": sum(seconds) / len(seconds) / max(seconds)}


def gather_peak_memory_mib(strategy: Strategy) -> list[float]:
    """Peak memory of every device of every process in MiB; every rank must call it."""
    return gather(strategy, [peak_bytes(device) / MIB for device in process_devices(strategy)])


def gather(strategy: Strategy, values: list[float]) -> list[float]:
    """Gather the values of all ranks in rank order; the list must have the same length on every rank."""
    assert strategy.lightning_module is not None
    trainer, device = strategy.lightning_module.trainer, strategy.root_device
    places = torch.zeros(trainer.world_size, len(values), dtype=precise_dtype(device), device=device)
    # under `global_view` each rank is the only one of its run
    places[trainer.global_rank if trainer.world_size > 1 else 0] = torch.tensor(values, dtype=places.dtype)
    gathered: torch.Tensor = strategy.reduce(places, reduce_op="sum")
    return gathered.flatten().tolist()


def peak_bytes(device: torch.device) -> int:
    """Peak memory of a device in bytes; for the CPU the largest resident size of this process."""
    measured = peak_memory_bytes(device)
    return peak_resident_bytes() if measured is None else measured


def peak_resident_bytes() -> int:
    """Peak resident size in bytes, since the last reset if the system supports resets (Linux)."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        line = next(line for line in lines if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peaks(devices: Iterable[torch.device]) -> None:
    """Reset the peaks, which may stem from an earlier run in this process, such as another job of a sweep.

    That of the CPU is reset if the system supports it (Linux: proc_pid_clear_refs(5), value 5).
    """
    for device in devices:
        reset_peak_memory_bytes(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
