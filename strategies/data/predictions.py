"""Gather all ranks' predictions on rank 0, in the order of the loader."""

from collections.abc import Callable, Sequence
from typing import Any


def in_loader_order(
    predictions: Sequence[Any], positions: Sequence[int] | None, rank: int, gather: Callable[[Any], list[Any] | None]
) -> list[Any]:
    """Gather predictions on rank 0.

    Args:
        predictions: one per batch of this rank, on the CPU.
        positions: position of each among all ranks' batches; None if each rank reads its own stream: then predictions
            are concatenated by rank.
        gather: gathers the objects of all ranks on rank 0, and returns None on the others.

    Returns:
        On rank 0 all predictions in order, each once; an empty list elsewhere.
    """
    if positions is None:
        places = [(rank, number) for number in range(len(predictions))]
    else:
        places = [(position, 0) for position in positions[: len(predictions)]]
    gathered = gather(list(zip(places, predictions, strict=True)))
    everything = [entry for part in gathered or [] for entry in part]
    return [prediction for _, prediction in sorted(everything, key=lambda entry: entry[0])]
