"""The mean over a validation whose stream gives one rank seven samples and the other six."""

import os
from collections.abc import Iterator
from typing import Any

from frameworks.problem import Problem
from silent_bugs.case import Case, mean_square, perceptron, rows, square_errors
from torch.utils.data import IterableDataset


class Shared(IterableDataset[Any]):
    """Gives each rank its own samples, as a dataset of shards does."""

    def __iter__(self) -> Iterator[Any]:
        yield from rows(13, seed=1)[int(os.environ.get("RANK", "0")) :: int(os.environ.get("WORLD_SIZE", "1"))]


CASE = Case(
    issue="Lightning-AI/pytorch-lightning#21859",
    wrong="rounds the number of samples per rank, so that every mean is too large",
    problem=Problem(
        perceptron, mean_square, lambda: rows(16), ranks=2, validation=Shared, score=square_errors,
    ),
    compare=("val",),
    without=dict.fromkeys(("accelerate", "transformers", "ignite"), "deals the stream itself"),
)  # fmt: skip
