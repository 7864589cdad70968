"""Type aliases used in more than one room."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

Batch: TypeAlias = Any
"""Nested tensors, sequences, mappings or dataclasses, each of N samples along dimension 0."""

Chunk: TypeAlias = Any
"""The part of a batch for one device, of the batch's own type."""

Sizes: TypeAlias = Sequence[int]
"""Samples per chunk, in the order of the devices."""

Device: TypeAlias = torch.device | str | int
"""Anything that `torch.device` accepts."""

Unit: TypeAlias = Any
"""One item of a sampler: a list of indices if the loader collates batches, otherwise a key of the dataset."""
