"""Gather all ranks' predictions on rank 0, in the order of the loader."""

from collections.abc import Callable, Sequence
from typing import Any

from ..core.private import of_lightning
from .loaders import positions

Gather = Callable[[Any], list[Any] | None]
"""Gathers the objects of all ranks on rank 0, and returns None on the others."""


def merge_predictions(loop: Any, rank: int, gather: Gather) -> None:
    """Give rank 0's prediction loop the predictions of all ranks, each once; the others keep their own."""
    loaders = of_lightning.combined_loader(loop).flattened
    for loader, predictions in zip(loaders, of_lightning.predictions(loop), strict=True):
        merged = in_loader_order(predictions, positions(loader), rank, gather)
        predictions[:] = predictions if rank else merged


def in_loader_order(predictions: Sequence[Any], places: Sequence[int] | None, rank: int, gather: Gather) -> list[Any]:
    """Gather predictions on rank 0, in order; an empty list elsewhere.

    Args:
        predictions: one per batch of this rank, on the CPU.
        places: position of each among all ranks' batches; None if each rank reads its own stream: then predictions
            are concatenated by rank.
    """
    if places is None:
        known = [(rank, number) for number in range(len(predictions))]
    else:
        known = [(place, 0) for place in places[: len(predictions)]]
    gathered = gather(list(zip(known, predictions, strict=True)))
    everything = [entry for part in gathered or [] for entry in part]
    return [prediction for _, prediction in sorted(everything, key=lambda entry: entry[0])]
