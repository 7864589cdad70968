"""Gather all ranks' predictions on rank 0, in the order of the loader."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from ..core.private import of_lightning
from .loaders import positions

Gather = Callable[[Any], list[Any] | None]
"""Gathers the objects of all ranks on rank 0, and returns None on the others."""


def merge_predictions(loop: Any, rank: int, gather: Gather) -> None:
    """Give rank 0's prediction loop the predictions of all ranks, each once; the others keep their own.

    They are in the order of the loader's batches, or one rank's after the other's where each reads its own stream.
    """
    loaders = of_lightning.combined_loader(loop).flattened
    for loader, predictions in zip(loaders, of_lightning.predictions(loop), strict=True):
        places = positions(loader)
        known = [(rank, i) if places is None else (places[i], 0) for i in range(len(predictions))]
        gathered = gather(list(zip(known, predictions, strict=True)))
        if gathered is not None:
            in_order = sorted((entry for part in gathered for entry in part), key=itemgetter(0))
            predictions[:] = [prediction for _, prediction in in_order]
