"""Combine the outputs of a batch's chunks into one result, for strategies that cut a batch in one process."""

from collections.abc import Sequence
from typing import Any

import torch

from .log_recorder import LogRecorder
from .losses import ChunkLosses, LossReduction, chunk_losses, with_scalars


def losses_of(
    outputs: list[Any], chunks: Sequence[Any], sizes: Sequence[int], reduction: LossReduction, strategy: str
) -> ChunkLosses:
    """Read the losses of the chunks that have samples; the arguments are those of `combine_outputs`."""
    used = [i for i, size in enumerate(sizes) if size > 0]
    return chunk_losses(outputs, [chunks[i] for i in used], [sizes[i] for i in used], reduction, strategy)


def combine_outputs(
    outputs: list[Any],
    chunks: Sequence[Any],
    sizes: Sequence[int],
    logs: LogRecorder,
    reduction: LossReduction,
    strategy: str,
    device: torch.device,
) -> tuple[Any, list[str]]:
    """Combine what `training_step` returned for each chunk into one result, and log each recorded value once.

    Args:
        outputs: one per chunk that has samples.
        chunks: all chunks.
        sizes: samples per chunk.
        logs: the recorded calls of `self.log`.
        reduction: whether a chunk's loss is a mean or a sum.
        strategy: name that begins error messages.
        device: device of the result.

    Returns:
        A result of the kind that the module returned (None if it skips the batch), and the keys that are left out
        because their values are not scalars.

    Raises:
        ConfigError: a loss is missing, or is not a scalar.
    """
    if all(output is None for output in outputs):
        logs.replay(sizes)
        return None, []
    losses = losses_of(outputs, chunks, sizes, reduction, strategy)
    logs.replay(sizes, losses)
    loss = losses.combine(device)
    if not isinstance(outputs[0], dict):
        return loss, []
    return with_scalars(loss, losses, outputs, [size for size in sizes if size > 0], device)
