"""Log each device's share of the batch, its time and its memory.

The memory of the CPU is the process's resident size.
"""

import pytorch_lightning as pl
from pytorch_lightning.strategies import Strategy
from typing_extensions import override

from .start_up import global_sizes
from .step_times import DDPTimes, gather, gather_peak_memory_mib


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
