"""Weigh a loss by its number of samples, or by the `loss_weight` that the module returns.

A `training_step` returns the mean loss of its samples, or `{"loss": mean, "loss_weight": n}` if it is normalised by
something else (tokens, valid pixels). Wherever means over unequal parts are combined (chunks of a replica, ranks,
micro-batches of an accumulated step), part i has the weight w_i / sum(w).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from ..core.errors import ConfigError
from ..core.types import Batch
from .structure import BatchStructure, num_samples


def loss_weight(output: Any, batch: Batch, structure: BatchStructure | None = None) -> Tensor | float:
    """Find the weight of one step's loss.

    Args:
        output: what `training_step` returned: a loss, or a mapping with `loss` and perhaps `loss_weight`.
        batch: the batch it was computed on.
        structure: how its samples are counted; None takes the first tensor's rows.

    Returns:
        `loss_weight` if the module returned one (a tensor stays a tensor: nothing is read back to the host), otherwise
        the number of samples.

    Raises:
        ConfigError: the module returned no weight, and the batch holds no tensor to count samples by.
    """
    if isinstance(output, dict) and output.get("loss_weight") is not None:
        return output["loss_weight"]
    count = num_samples(batch) if structure is None else structure.num_samples(batch)
    if count is None:
        raise ConfigError(
            f"The batch of type {type(batch).__name__} holds no tensor with a dimension, so its samples can't be "
            'counted. Return {"loss": loss, "loss_weight": n} from training_step.'
        )
    return float(count)


def is_loss(value: Any, loss: Tensor) -> bool:
    """Whether a logged value is the loss, or the loss detached."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.data_ptr() == loss.data_ptr()


@dataclass(frozen=True)
class WeighedLoss:
    """The loss of a step under ranks, as far as `self.log` needs to know it.

    Args:
        losses: tensors that are the loss where they are logged; each shares its storage with what was logged.
        scale: this rank's fraction of the weight of the global batch, times the number of ranks; of shape ().
    """

    losses: Sequence[Tensor]
    scale: Tensor

    def is_loss(self, value: Any) -> bool:
        """Whether a logged value is the loss, or the loss detached."""
        return any(is_loss(value, loss) for loss in self.losses)


def weighs_in_loop(trainer: "pl.Trainer") -> bool:
    """Whether the loop weighs micro-batches itself, so that the strategy must not.

    With exact accumulation each micro-batch's loss is multiplied by its weight, and the gradients are divided
    once, before clipping, by the sum of the weights over all micro-batches and ranks.
    """
    return bool(getattr(trainer, "exact_accumulation", False)) and trainer.accumulate_grad_batches > 1
