"""Weigh losses by their numbers of samples, or by the `loss_weight` that the module returns, and combine them.

A `training_step` returns the mean loss of its samples, or of something else (tokens, valid pixels), whose number is
found (`exact/plans.py`), or given as `{"loss": mean, "loss_weight": n}`. Wherever means over unequal parts are combined
(chunks of a replica, ranks, micro-batches of an accumulated step), part i has the weight w_i / sum(w), which makes the
mean over the whole batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loops.optimization.automatic import ClosureResult
from torch import Tensor

from ..core.errors import ConfigError
from ..core.types import Batch
from .results import ResultStructure, combine
from .structure import BatchStructure, num_samples

FOUND = "found_loss_weight"
"""What a loss was found to divide by, beside it in the output of a step, in place of a `loss_weight`."""


@dataclass
class ChunkLosses:
    """The losses of all chunks of a batch.

    Args:
        losses: one scalar per chunk that has samples, each on its own device.
        weights: samples per chunk, or the `loss_weight` that the module returned.
    """

    losses: list[Tensor]
    weights: list[Tensor | float]

    def combine(self, device: torch.device) -> Tensor:
        """The loss of the whole batch, on `device`, of shape ()."""
        return combine([loss.reshape(()) for loss in self.losses], self.weights, "mean", device).reshape(())

    def total(self, device: torch.device) -> Tensor | float:
        """The sum of the weights; a float if all of them are floats."""
        return combine([1.0 * weight for weight in self.weights], [], "sum", device)


def chunk_losses(outputs: Sequence[Any], sizes: Sequence[int], strategy: str) -> ChunkLosses:
    """Read the losses and their weights from what `training_step` returned for each chunk.

    Args:
        outputs: one per chunk, a loss or a mapping with `loss`.
        sizes: samples per chunk; of one without samples there is no output.
        strategy: name that begins error messages.

    Raises:
        ConfigError: a loss is missing, or is not a scalar.
    """
    sizes = [size for size in sizes if size > 0]
    losses: list[Any] = [output.get("loss") if isinstance(output, dict) else output for output in outputs]
    for i, loss in enumerate(losses):
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise ConfigError(
                f"{strategy}: training_step returned a loss of {found} for a chunk of {sizes[i]} samples. Return a "
                "scalar, the mean over the chunk's samples; or define training_step_end(outputs) and compute it there."
            )
    given = list(map(weight_in, outputs))
    weights = [float(size) if weight is None else weight for weight, size in zip(given, sizes, strict=True)]
    return ChunkLosses(losses, weights)


def join_evaluated(
    outputs: Sequence[Any], sizes: Sequence[int], results: ResultStructure, device: torch.device, strategy: str
) -> tuple[Any, ChunkLosses | None]:
    """Join what a step of evaluation returned for each chunk; returns the losses, too, if it returned these."""
    joined = results.join(outputs, sizes, device)
    if not all(losses_in(output) and not losses_in(output)[0].dim() for output in outputs):
        return joined, None
    losses = chunk_losses(outputs, sizes, strategy)
    loss = losses.combine(device)
    return {**joined, "loss": loss} if isinstance(joined, dict) else loss, losses


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
    if (weight := weight_in(output)) is not None:
        return weight
    count = num_samples(batch) if structure is None else structure.num_samples(batch)
    if count is None:
        raise ConfigError(
            f"The batch of type {type(batch).__name__} holds no tensor with a dimension, so its samples can't be "
            'counted. Return {"loss": loss, "loss_weight": n} from training_step.'
        )
    return float(count)


def address(tensor: Tensor) -> int:
    """Where the numbers of a tensor are; 0 for a sparse one, which has no place of its own."""
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def is_loss(value: Any, loss: Tensor) -> bool:
    """Whether a logged value is the loss, or the loss detached."""
    return isinstance(value, Tensor) and value.numel() == 1 and address(value) == address(loss)


def weighs_in_loop(trainer: "pl.Trainer") -> bool:
    """Whether the loop weighs micro-batches itself, so that the strategy must not.

    With exact accumulation each micro-batch's loss is multiplied by its weight, and the gradients are divided
    once, before clipping, by the sum of the weights over all micro-batches and ranks.
    """
    return bool(getattr(trainer, "exact_accumulation", False)) and trainer.accumulate_grad_batches > 1


def weight_in(output: Any) -> Any:
    """What the loss in a step's output is a mean over, as the module has given it, or as it was found; else None."""
    if not isinstance(output, dict):
        return None
    given = output.get("loss_weight")
    return output.get(FOUND) if given is None else given


def loss_and_others(output: Any) -> tuple[Tensor, dict[str, Any]]:
    """Take apart what a training step returned: the loss, and what hooks get beside it; Lightning's error without."""
    if isinstance(output, Tensor):
        return output, {}
    if not isinstance(output, Mapping) or output.get("loss") is None:
        ClosureResult.from_training_step_output(output)  # raises it
    return output["loss"], {key: value for key, value in output.items() if key not in ("loss", FOUND)}


def losses_in(output: Any) -> list[Tensor]:
    """The loss that a training step has returned, as a list of at most one; wrappers may pass on a copy of it."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return [loss.detach()] if isinstance(loss, Tensor) else []
