"""A network that goes elsewhere between steps and comes back, on two ranks."""

from typing import Any

from frameworks.problem import Batch, Problem
from silent_bugs.case import Case, mean_square, perceptron, rows
from torch import Tensor


def back_and_forth(net: Any, batch: Batch) -> Tensor:
    net.float().double()  # what a move to the CPU and back does to a network on a GPU, without one
    return mean_square(net, batch)


CASE = Case(
    issue="Lightning-AI/pytorch-lightning#17937",
    wrong="does not average gradients any more: each rank trains its own weights",
    problem=Problem(perceptron, back_and_forth, lambda: rows(32), ranks=2),
)
