"""What torch's DistributedDataParallel measures of itself, in a sample of the steps."""

from typing import Any

import pytorch_lightning as pl
from torch.nn.parallel import DistributedDataParallel

NS_PER_MS = 1e6


class DDPTimes:
    """Reads the times of the last step that torch sampled.

    Args:
        model: the wrapper, which keeps the times of one step in `every`.
        every: number of batches between two samples.

    Source: `torch/nn/parallel/distributed.py` (torch 2.13), `_get_ddp_logging_data`.
    """

    def __init__(self, model: DistributedDataParallel, every: int) -> None:
        self._model = model
        model._set_ddp_runtime_logging_sample_rate(every)

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "DDPTimes | None":
        """The times of a trainer's wrapper, sampled once per log point; None where it has none."""
        model = trainer.strategy.model
        every: int = getattr(trainer, "log_every_n_steps")  # noqa: B009  # Lightning sets it undeclared
        if not isinstance(model, DistributedDataParallel) or not every:
            return None
        return cls(model, every * trainer.accumulate_grad_batches)

    def exposed_communication_ms(self) -> float | None:
        """Milliseconds that gradients were on their way while no backward pass ran, waiting for other ranks included.

        Returns:
            None until torch has sampled a step.
        """
        data: dict[str, Any] = self._model._get_ddp_logging_data()
        if "backward_comm_time" not in data:
            return None
        return max(0, int(data["backward_comm_time"]) - int(data["backward_compute_comm_overlap_time"])) / NS_PER_MS

    def own_compute_s(self) -> float | None:
        """Seconds of this rank's forward and backward pass, without waiting for other ranks."""
        data: dict[str, Any] = self._model._get_ddp_logging_data()
        if "backward_compute_time" not in data:
            return None
        return (int(data["forward_compute_time"]) + int(data["backward_compute_time"])) / NS_PER_MS / 1000
