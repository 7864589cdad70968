"""Five batches, accumulated by two: the last optimizer step has one batch only."""

from frameworks.problem import Problem
from silent_bugs.case import Case, mean_square, perceptron, rows

CASE = Case(
    issue="huggingface/transformers#39659",
    wrong="divides the last batch of the epoch by the two that it lacks",
    problem=Problem(perceptron, mean_square, lambda: rows(40), accumulate=2),
)
