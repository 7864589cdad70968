"""Log the gradients' norm and histograms, and detect inf and nan in them without waiting for the device."""

import logging
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ...strategies.core.errors import ConfigError
from ...strategies.core.loop_contract import unwrapped
from ...strategies.core.options import Count, checked
from ...strategies.sharding.whole import gather_tree, own_part, total_norm

logger = logging.getLogger(__name__)


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
        several = len(trainer.optimizers) > 1
        name = f"gradient/norm_{trainer.optimizers.index(unwrapped(optimizer))}" if several else "gradient/norm"
        values = {name: total_norm(gradients_of(optimizer), self.norm_type).item()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


class Histograms(pl.Callback):
    """Log histograms `weights/<parameter>` and `gradients/<parameter>` to TensorBoard after an epoch's last batch.

    The gradients are those of the epoch's last step, as the optimizer got them: summed over replicas, averaged over
    ranks, clipped. A parameter that has none, or has had it set to None, has no histogram of gradients. Every value is
    read on the host, so this costs time with each epoch; other loggers get nothing.

    Args:
        every_n_epochs: number of epochs between histograms.
    """

    @checked
    def __init__(self, every_n_epochs: Count = 1) -> None:
        self.every_n_epochs = every_n_epochs

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Log the histograms after the last batch: validation, which follows, sets the gradients to None."""
        if not trainer.is_last_batch or (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        writers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not writers:
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for name, parameter in pl_module.named_parameters():
            for kind, values in (("weights", parameter), ("gradients", parameter.grad)):
                if values is None:
                    continue
                whole = gather_tree(values.detach(), keep=trainer.is_global_zero)  # of shards, which all ranks must ask
                for writer in writers if trainer.is_global_zero else ():
                    writer.experiment.add_histogram(f"{kind}/{name}", whole.float().cpu(), step)


class DetectNonFinite(pl.Callback):
    """Check the gradients before every optimizer step.

    On the CPU the result is available at once. An accelerator records the first bad step in its own memory; the record
    is read when the host synchronizes anyway: at a logged step, before a validation, at the end of an epoch, and before
    a checkpoint is written, so that a checkpoint never contains weights damaged by such a step.

    Args:
        action: `raise` stops training with an error; `skip_step` keeps weights and optimizer state unchanged and
            continues (schedulers and step numbers count the step). It waits for the device in every step.

    Raises:
        ConfigError: `action` is unknown, or precision is 16-mixed (which skips such steps itself).
    """

    @checked
    def __init__(self, action: Literal["raise", "skip_step"]) -> None:
        self.action = action
        self.num_skipped = 0
        """Number of skipped steps."""
        self._first_bad: Tensor | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ConfigError(
                f"detect_nonfinite={self.action} is not supported with precision=16-mixed, which skips such steps "
                "itself. Set detect_nonfinite=off, or precision=bf16-mixed."
            )
        self._first_bad = None

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if not (gradients := gradients_of(optimizer)):
            return
        # The largest absolute value: unlike a sum of squares it can't overflow for finite gradients.
        finite, number = total_norm(gradients, torch.inf).isfinite(), trainer.global_step
        if self.action == "raise" and finite.device.type != "cpu":
            step = torch.full_like(finite, number, dtype=torch.int64)
            first = torch.full_like(step, -1) if self._first_bad is None else self._first_bad
            self._first_bad = torch.where((first < 0) & ~finite, step, first)
        elif self.action == "raise" and not finite:
            named = [(name, p.grad) for name, p in pl_module.named_parameters() if p.grad is not None]
            raise self._error(number, [name for name, gradient in named if not own_part(gradient).isfinite().all()])
        elif not finite:
            self.num_skipped += 1
            logger.warning("The gradients of optimizer step %d are not finite; the step is skipped.", number)
            optimizer.zero_grad(set_to_none=True)  # torch's optimizers skip parameters without gradients

    def _error(self, step: int, parameters: list[str]) -> FloatingPointError:
        where = f" (of {', '.join(parameters[:3])}{' and others' if len(parameters) > 3 else ''})" if parameters else ""
        return FloatingPointError(
            f"The gradients of optimizer step {step}{where} are not finite. Lower the learning rate, set "
            "trainer.gradient_clip_val, or inspect the batch; trainer.detect_nonfinite=skip_step skips such steps."
        )

    def _read(self, *args: Any, **kwargs: Any) -> None:
        """Read the accelerator's record, which synchronizes with the device."""
        if self._first_bad is not None and (step := int(self._first_bad)) >= 0:
            raise self._error(step, [])

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        every: int = getattr(trainer, "log_every_n_steps", 0)
        if every and trainer.global_step % every == 0:
            self._read()

    on_validation_start = on_train_epoch_end = on_save_checkpoint = _read


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that an optimizer will update its parameters with."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
