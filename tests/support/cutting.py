"""Cut batches, and join results, of which nothing but the values is known."""

from typing import Any

import torch

from evener.strategies.batch.results import ResultStructure
from evener.strategies.batch.structure import BatchStructure


def split(batch: Any, sizes: list[int]) -> list[Any]:
    """Cut a batch into one chunk per size."""
    return BatchStructure().split(batch, sizes)


def join(chunks: list[Any], sizes: list[int], device: torch.device | None = None) -> Any:
    """Join the results of chunks; the inverse of `split`."""
    return ResultStructure("output").join(chunks, sizes, device)
