"""Killed after the validation in the middle of an epoch, and resumed: the validations that follow."""

from frameworks.problem import Problem
from silent_bugs.case import Case, mean_square, perceptron, rows, square_errors

CASE = Case(
    issue="Lightning-AI/pytorch-lightning#19549",
    wrong="validates on the first batch only and reports this as the validation's mean",
    problem=Problem(
        perceptron, mean_square, lambda: rows(24), batch_size=4, save=True,
        validation=lambda: rows(12, seed=1), score=square_errors, validations=2,
    ),
    kill_after=4,
    compare=("validated", "val"),
    without=dict.fromkeys(("accelerate", "ignite"), "validates where the user's loop does"),
    warning="ended before the epoch ended",
)  # fmt: skip
