"""Peak memory of each device."""

import resource
import sys

import pytorch_lightning as pl
import torch
from typing_extensions import override

from ...strategies.devices import peak_memory_bytes

MIB = 2**20


class DeviceMonitor(pl.Callback):
    """Log, after each training epoch, the peak memory of each of this process's devices in MiB.

    On accelerators this is what tensors took (`torch.cuda.max_memory_allocated`), on the CPU the process's
    largest resident size. Tags are `device/<device>/peak_memory_mib`.
    """

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        owned = getattr(trainer.strategy, "process_devices", None) or [trainer.strategy.root_device]
        values = {f"device/{device}/peak_memory_mib": peak_memory_mib(device) for device in owned}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory of a device in MiB; for the CPU the largest resident size of this process."""
    measured = peak_memory_bytes(device)
    if measured is not None:
        return measured / MIB
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB
