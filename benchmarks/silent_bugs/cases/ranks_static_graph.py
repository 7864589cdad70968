"""`static_graph=True` on two ranks."""

from frameworks.problem import Problem
from silent_bugs.case import Case, mean_square, perceptron, rows

CASE = Case(
    issue="Lightning-AI/pytorch-lightning#20704",
    wrong="leaves the ranks with different weights",
    problem=Problem(perceptron, mean_square, lambda: rows(32), ranks=2, ddp={"static_graph": True}),
    without={"transformers": "has no such option"},
)
