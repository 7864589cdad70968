"""The last batch has three samples and is accumulated with one of eight."""

from frameworks.problem import Problem
from silent_bugs.case import Case, mean_square, perceptron, rows

CASE = Case(
    issue="Lightning-AI/pytorch-lightning#20350",
    wrong="weighs three samples like eight",
    problem=Problem(perceptron, mean_square, lambda: rows(27), accumulate=2),
)
