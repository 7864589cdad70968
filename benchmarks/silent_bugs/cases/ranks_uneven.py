"""Twenty-one samples for two ranks."""

from frameworks.problem import Problem
from silent_bugs.case import Case, mean_square, perceptron, rows

CASE = Case(
    issue="pytorch/pytorch#22584",
    wrong="trains on samples twice to make the ranks even, or averages means of unequal parts",
    problem=Problem(perceptron, mean_square, lambda: rows(21), ranks=2),
)
