"""Log the gradient's norm."""

import pytorch_lightning as pl
from torch.optim import Optimizer
from typing_extensions import override

from ...strategies.core.optimizer_states import unwrapped
from ...strategies.sharding.whole import total_norm


class GradientNorm(pl.Callback):
    """Log the gradient's norm before clipping, as `gradient/norm`, at every log point.

    The gradient is the one that the optimizer would get without clipping: summed over replicas, averaged over ranks,
    and unscaled under mixed precision. Reading it synchronizes with the device, at log points only.

    Args:
        norm_type: 2 for the Euclidean norm, `inf` for the largest absolute value.
    """

    def __init__(self, norm_type: float = 2.0) -> None:
        self.norm_type = float(norm_type)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if not trainer.loggers or not trainer._logger_connector.should_update_logs:
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        several = len(trainer.optimizers) > 1
        name = f"gradient/norm_{trainer.optimizers.index(unwrapped(optimizer))}" if several else "gradient/norm"
        values = {name: total_norm(gradients, self.norm_type).item()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
