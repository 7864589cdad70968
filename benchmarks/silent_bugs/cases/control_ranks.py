"""Nothing special, on two ranks: as `control_accumulated`."""

from frameworks.problem import Problem
from silent_bugs.case import Case, mean_square, perceptron, rows

CASE = Case(
    issue="", wrong="a control: equal parts", problem=Problem(perceptron, mean_square, lambda: rows(32), ranks=2)
)
