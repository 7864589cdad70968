"""Log each device's share of the batch, its time and its memory.

The memory of the CPU is the process's resident size.
"""

import pytorch_lightning as pl
from typing_extensions import override

from .start_up import global_sizes
from .step_times import gather_peak_memory_mib


class DeviceMonitor(pl.Callback):
    """Log memory, batch share and time of every device of every process after each training epoch.

    Devices are numbered over all processes (`partition` in TensorBoard's TEXT tab lists them).

    - `device/peak_memory_mib_<i>`: on accelerators the memory of tensors (`torch.cuda.max_memory_allocated`), on the
      CPU the process's largest resident size, the same for all devices of a process.
    - `balance/share_<i>`: the device's fraction of a full batch, if batches are cut among devices. Strategies that
      measure devices log these during training, with `balance/time_s_<i>` and `balance/efficiency`.
    """

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        memory = gather_peak_memory_mib(trainer.strategy)
        values = {f"device/peak_memory_mib_{i}": value for i, value in enumerate(memory)}
        sizes, _ = global_sizes(trainer)  # empty, or one, if the batch is not cut
        if len(sizes) > 1 and not any(name.startswith("balance/") for name in trainer.logged_metrics):
            values |= {f"balance/share_{i}": size / sum(sizes) for i, size in enumerate(sizes)}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=max(0, trainer.fit_loop.epoch_loop._batches_that_stepped - 1))
