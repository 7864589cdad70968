"""Cut nested batches into chunks by sizes, and join the chunks' results, where nothing but the values is known.

Strategies know more of their batches, and use a `BatchStructure` for the whole run; see there what becomes of a value.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..core.types import Batch, Chunk, Sizes
from ._tree import plain_lengths, row_counts
from .structure import BatchStructure


def num_samples(batch: Batch) -> int | None:
    """Count the samples of a batch: the rows of the first tensor found, else the length of the first plain sequence.

    For what is only shown. What is cut or weighed is counted by `BatchStructure.num_samples`.

    Args:
        batch: nested tensors, each of shape (N, ...); or lists of N strings or numbers; or an object with `split` and
            a length.

    Returns:
        N, or None where the batch holds nothing to count.
    """
    count = next((rows for _, rows in row_counts(batch)), None)
    return count if count is not None else next(plain_lengths(batch), None)


def split(batch: Batch, sizes: Sizes) -> list[Chunk]:
    """Cut a batch along dimension 0.

    Tensors are views of the batch's. An empty chunk has tensors of shape (0, ...).

    Args:
        batch: nested tensors, each of shape (N, ...).
        sizes: samples per chunk; they sum to N.

    Returns:
        One chunk per size, in order, of the batch's own type; chunk i has tensors of shape (sizes[i], ...).

    Raises:
        ConfigError: a value can't be cut, tensors disagree on N, or a list can be read in two ways; the message names
            it.
    """
    return BatchStructure().split(batch, sizes)


def join(chunks: Sequence[Chunk], sizes: Sizes, device: torch.device | None = None) -> Any:
    """Join the results of chunks; the inverse of `split`.

    Args:
        chunks: one result per chunk, all of one structure; per-sample tensors have shape (sizes[i], ...).
        sizes: samples per chunk.
        device: where joined tensors live; None takes the first chunk's.

    Returns:
        The same structure: rows and per-sample lists in order; fractions are means weighted by the sizes; other
        values are equal in all chunks.

    Raises:
        ConfigError: a value can't be joined; the message names it.
    """
    return BatchStructure(root="output").join(chunks, sizes, device)
