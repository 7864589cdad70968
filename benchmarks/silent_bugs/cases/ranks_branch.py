"""A layer that only batches with a certain sample use: on one rank it has a gradient, on the other it has none."""

from frameworks.problem import Problem
from silent_bugs.case import Case, mean_square, rows
from torch import Tensor, nn


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        large = x[:, :1] > 1.5
        return self.usual(x) + (self.rare(x) * large if large.any() else 0)


CASE = Case(
    issue="pytorch/pytorch#69031",
    wrong="loses the gradient of a layer that not all ranks have used",
    problem=Problem(Branching, mean_square, lambda: rows(32), ranks=2, ddp={"find_unused_parameters": True}),
)
