"""Twenty-one samples for two ranks."""

from silent_bugs.case import Case, mean_square, perceptron, rows

from frameworks.problem import Problem

CASE = Case(
    issue="https://github.com/pytorch/pytorch/issues/22584",
    wrong="trains on samples twice to make the ranks even, or averages means of unequal parts",
    problem=Problem(perceptron, mean_square, lambda: rows(21), ranks=2),
)
