"""The mean over thirteen samples, validated on two ranks."""

from frameworks.problem import Problem
from silent_bugs.case import Case, mean_square, perceptron, rows, square_errors

CASE = Case(
    issue="pytorch/pytorch#25162",
    wrong="counts samples twice to make the ranks even",
    problem=Problem(
        perceptron, mean_square, lambda: rows(16), ranks=2, validation=lambda: rows(13, seed=1), score=square_errors,
    ),
    compare=("val",),
    warning="DistributedSampler.*each sample",
)  # fmt: skip
