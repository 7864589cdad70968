"""Combine the outputs of a batch's chunks into one result, for strategies that cut a batch in one process."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import WarningCache

from ..core.no_value import NoValue
from .log_recorder import LogRecorder
from .losses import FOUND, LossReduction, chunk_losses
from .results import ResultStructure


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
        `loss_weight` if the module returned it and, if they are read, the other values that can be joined. That of a
        single chunk has all its keys.

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
    if len(outputs) > 1 and is_read():
        for key, value in _joined_rest(outputs, sizes, device, structure).items():
            if isinstance(value, NoValue):
                told.info(
                    f"{strategy}: training_step's output {key!r} does not reach callbacks: what it is of the whole "
                    "batch isn't known. Return a tensor with one row per sample, or set strategy.batch_dims="
                    f"{{training_step.{key}: sum}}, mean, list, 0 or none."
                )
            else:
                result[key] = value
    return result


@torch.no_grad()
def _joined_rest(
    outputs: list[Any], sizes: Sequence[int], device: torch.device, structure: ResultStructure
) -> dict[str, Any]:
    own = ("loss", "loss_weight", FOUND)
    rest = [{key: value for key, value in output.items() if key not in own} for output in outputs]
    joined = structure.join(rest, sizes, device)
    return joined if isinstance(joined, dict) else dict.fromkeys(rest[0], joined)
