"""Clipping by the norm of parameters that are cut over two ranks (FSDP)."""

from silent_bugs.case import Case, mean_square, perceptron, rows

from frameworks.problem import Problem

CASE = Case(
    issue="https://github.com/pytorch/pytorch/issues/170862",
    wrong="clips by the norm of a rank's own shards",
    problem=Problem(perceptron, mean_square, lambda: rows(32), ranks=2, clip=0.05, strategy="fsdp"),
    without={"transformers": "is Accelerate's", "ignite": "has no such strategy"},
)
