"""A model that does not know how many items the accumulated batch has: a masked mean of its own."""

from typing import Any

from frameworks.problem import Batch, Problem
from silent_bugs.case import Case, perceptron, rows
from torch import Tensor


def masked_mean(net: Any, batch: Batch) -> Tensor:
    mask = (batch["x"][:, :1] > 0).double()
    errors = (net(batch["x"]) - batch["labels"]).square()
    return (errors * mask).sum() / mask.sum()


CASE = Case(
    issue="huggingface/transformers#37766",
    wrong="averages the accumulated batches' means, since the model takes no number of items",
    problem=Problem(perceptron, masked_mean, lambda: rows(32), accumulate=2),
)
