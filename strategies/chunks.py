"""Cut nested batches into chunks and join them again."""

from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from .types import Batch


def num_samples(batch: Batch) -> int | None:
    """Count the samples of a batch: the length of the first tensor found, along dimension 0.

    Args:
        batch: nested tensors, each of shape (N, ...).

    Returns:
        N, or None where the batch holds no tensor with a dimension.
    """
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    children: list[Any] = []
    if isinstance(batch, dict):
        children = list(batch.values())
    elif isinstance(batch, (list, tuple)):
        children = list(batch)
    elif is_dataclass(batch) and not isinstance(batch, type):
        children = [getattr(batch, field.name) for field in fields(batch)]
    return next((n for child in children if (n := num_samples(child)) is not None), None)
