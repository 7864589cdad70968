"""Noise that two data workers draw, in two epochs."""

from itertools import chain

from frameworks.problem import Problem
from silent_bugs.case import Case, Outcomes, mean_square, perceptron
from silent_bugs.cases.ranks_same_noise import Noise


def fresh(outcomes: Outcomes) -> str:
    batches = outcomes[0]["inputs"]
    first, second = (set(chain(*half)) for half in (batches[: len(batches) // 2], batches[len(batches) // 2 :]))
    same = first & second
    return f"{len(same)} of {len(first)} samples have the first epoch's noise in the second" if same else ""


CASE = Case(
    issue="Lightning-AI/pytorch-lightning#20412",
    wrong="applies the same augmentations in every epoch",
    problem=Problem(perceptron, mean_square, lambda: Noise(16), workers=2, epochs=2),
    property=fresh,
)
