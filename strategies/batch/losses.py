"""Combine the losses of chunks, weighted by n_i/N.

With chunk losses L_i that are means over w_i samples (or tokens), the root optimizes sum(w_i / W * L_i), W = sum(w_i),
which is the mean over the whole batch, however unequal the chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..core.errors import ConfigError

LossReduction: TypeAlias = Literal["mean", "sum"]
"""Whether a module's loss is a mean over samples or a sum."""


@dataclass(frozen=True)
class ChunkLosses:
    """The losses of all chunks of a batch.

    Args:
        losses: one scalar per chunk that has samples, each on its own device.
        weights: samples per chunk, or the `loss_weight` that the module returned.
        reduction: whether a chunk's loss is a mean or a sum.
    """

    losses: list[Tensor]
    weights: list[Tensor | float]
    reduction: LossReduction = "mean"

    def combine(self, device: torch.device) -> Tensor:
        """The loss of the whole batch, on `device`, of shape ()."""
        moved = [loss.to(device).reshape(()) for loss in self.losses]
        if self.reduction == "sum":
            return torch.stack(moved).sum()
        weights = [_on(weight, device) for weight in self.weights]
        parts = [loss * share for loss, share in zip(moved, _shares(weights), strict=True)]
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

    def total(self, device: torch.device) -> Tensor | float:
        """The sum of the weights; a float if all of them are floats."""
        return sum((_on(weight, device) for weight in self.weights), start=0.0)


def chunk_losses(outputs: Sequence[Any], sizes: Sequence[int], reduction: LossReduction, strategy: str) -> ChunkLosses:
    """Read the losses and their weights from what `training_step` returned for each chunk.

    Args:
        outputs: one per chunk, a loss or a mapping with `loss`.
        sizes: samples per chunk; of one without samples there is no output.
        reduction: whether a chunk's loss is a mean or a sum.
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
    given = [output.get("loss_weight") if isinstance(output, dict) else None for output in outputs]
    weights = [float(size) if weight is None else weight for weight, size in zip(given, sizes, strict=True)]
    return ChunkLosses(losses, weights, reduction)


def is_fraction(value: Any) -> bool:
    """Whether a value is a floating-point number, which is taken for a mean over samples; counts add up."""
    return isinstance(value, float) or (isinstance(value, Tensor) and not value.dim() and value.is_floating_point())


def _shares(weights: Sequence[Any]) -> list[Any]:
    """Each weight's fraction of their sum; equal fractions if all are zero (a batch of padding only)."""
    total: Any = sum(weights, start=0.0)
    if not isinstance(total, Tensor):
        return [weight / total if total else 1.0 / len(weights) for weight in weights]
    return [torch.where(total == 0, 1.0 / len(weights), weight / total) for weight in weights]


def _on(weight: Tensor | float, device: torch.device) -> Any:
    return weight.to(device) if isinstance(weight, Tensor) else float(weight)
