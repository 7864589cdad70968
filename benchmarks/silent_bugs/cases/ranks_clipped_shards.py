"""Clipping by the norm of parameters that are cut over two ranks (FSDP)."""

from frameworks.problem import Problem
from silent_bugs.case import Case, mean_square, perceptron, rows

CASE = Case(
    issue="pytorch/pytorch#170862",
    wrong="clips by the norm of a rank's own shards",
    problem=Problem(perceptron, mean_square, lambda: rows(32), ranks=2, clip=0.05, strategy="fsdp"),
    without={"lightning": "has it on GPUs only", "transformers": "is Accelerate's", "ignite": "has no such strategy"},
)
