"""A loss that is a sum over the batch, on two ranks."""

from typing import Any

from frameworks.problem import Batch, Problem
from silent_bugs.case import Case, perceptron, rows
from torch import Tensor
from torch.nn import functional as F


def summed(net: Any, batch: Batch) -> Tensor:
    return F.mse_loss(net(batch["x"]), batch["labels"], reduction="sum") / 50


CASE = Case(
    issue="modelscope/ms-swift#10081",
    wrong="trains with exactly half of the gradient",
    problem=Problem(perceptron, summed, lambda: rows(32), ranks=2),
)
