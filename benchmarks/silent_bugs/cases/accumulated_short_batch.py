"""The last batch has three samples and is accumulated with one of eight."""

from silent_bugs.case import Case, mean_square, perceptron, rows

from frameworks.problem import Problem

CASE = Case(
    issue="https://github.com/Lightning-AI/pytorch-lightning/issues/20350",
    wrong="weighs three samples like eight",
    problem=Problem(perceptron, mean_square, lambda: rows(27), accumulate=2),
)
