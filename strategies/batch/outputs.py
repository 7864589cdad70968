"""Combine the outputs of a batch's chunks into one result, for strategies that cut a batch in one process."""

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor

from .log_recorder import LogRecorder
from .losses import FOUND, LossReduction, chunk_losses, is_fraction
from .results import ResultStructure, are_equal


def combine_outputs(
    outputs: list[Any],
    valued: list[Any],
    sizes: Sequence[int],
    logs: LogRecorder,
    reduction: LossReduction,
    strategy: str,
    device: torch.device,
    structure: ResultStructure,
    told: WarningCache,
    is_read: Callable[[], bool],
) -> Any:
    """Combine what `training_step` returned for each chunk into one result, and log each recorded value once.

    Args:
        outputs: one per chunk that has samples.
        valued: the same, with the losses to be combined.
        sizes: samples per chunk.
        logs: the recorded calls of `self.log`.
        reduction: whether a chunk's loss is a mean or a sum.
        strategy: name that begins error messages.
        structure: of what `training_step` returns.
        told: tells once of each key that is left out.
        is_read: whether a hook of the user's receives the result.

    Returns:
        A result of the kind that the module returned; None if it skips the batch. A mapping has `loss`, the sum of
        `loss_weight` if the module returned it, means of fractions, what `batch_dims` declares and, if it is read,
        tensors of one row per sample. Other values stay where they are, and integers, which may be sums or anything
        else. That of a single chunk has all its keys.

    Raises:
        ConfigError: a loss is missing, or is not a scalar.
    """
    if all(output is None for output in outputs):
        logs.replay(sizes)
        return None
    losses = chunk_losses(valued, sizes, reduction, strategy)
    losses.shown = [output["loss"] if isinstance(output, dict) else output for output in outputs]
    logs.replay(sizes, losses)
    loss = losses.combine(device)
    if not isinstance(outputs[0], dict):
        return loss
    result = dict(outputs[0]) if len(outputs) == 1 else {}
    result["loss"] = loss
    for weight in outputs[0].keys() & {"loss_weight", FOUND}:
        result[weight] = losses.total(device)
    for key in outputs[0].keys() - {"loss", "loss_weight", FOUND}:
        values = [output.get(key) for output in outputs]
        if structure.is_declared((key,)) or is_fraction(values[0]) or _are_constant(values):
            result |= structure.join([{key: value} for value in values], sizes, device)
        elif len(outputs) > 1 and _are_rows(values, sizes) and is_read():
            result[key] = torch.cat([value.detach().to(device) for value in values])
        elif len(outputs) > 1:
            told.info(
                f"{strategy}: training_step's output {key!r} stays on its chunk and does not reach callbacks: it is no "
                f"mean over samples. Set strategy.batch_dims={{training_step.{key}: sum, list or 0}}, or define "
                "training_step_end(outputs) to have the outputs of all chunks joined on the root device."
            )
    return result


def _are_rows(values: list[Any], sizes: Sequence[int]) -> bool:
    """Whether each chunk has returned a tensor with a row for each of its samples."""
    used = [size for size in sizes if size]
    pairs = zip(values, used, strict=True)
    return all(isinstance(value, Tensor) and value.dim() > 0 and len(value) == size for value, size in pairs)


def _are_constant(values: list[Any]) -> bool:
    return isinstance(values[0], (str, bool, NoneType)) and are_equal(values)
