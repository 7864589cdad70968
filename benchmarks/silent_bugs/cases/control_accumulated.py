"""Nothing special, accumulated: a framework or an adapter that is not exact here has no use for the other cases."""

from frameworks.problem import Problem
from silent_bugs.case import Case, mean_square, perceptron, rows

CASE = Case(
    issue="", wrong="a control: equal batches", problem=Problem(perceptron, mean_square, lambda: rows(32), accumulate=2)
)
