"""What strategies share that cut a batch inside one process: what they refuse, and one result for the whole batch."""

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
    """Make one result of what `training_step` returned for each chunk, and log what it logged once.

    Args:
        outputs: one per chunk that has samples.
        chunks: all chunks.
        sizes: samples per chunk.
        logs: what was logged.
        reduction: what a module's loss is.
        strategy: the name to begin errors with.
        device: where the result is to be.

    Returns:
        A result of the kind that the module returned (None where it skips the batch), and the keys of its outputs
        that are no scalars, which are left out.

    Raises:
        ConfigError: a loss is missing, or is no scalar.
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
