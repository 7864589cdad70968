"""A loader with `shuffle=False`, on two ranks."""

from itertools import chain

from frameworks.problem import Problem
from silent_bugs.case import Case, Outcomes, mean_square, perceptron, rows


def in_order(outcomes: Outcomes) -> str:
    steps = zip(*(outcome["seen"] for outcome in outcomes), strict=True)
    first = sorted(chain.from_iterable(next(steps)))
    return "" if first == list(range(8)) else f"the first step has samples {first}"


CASE = Case(
    issue="Lightning-AI/pytorch-lightning#10170 Lightning-AI/pytorch-lightning#21131",
    wrong="shuffles",
    problem=Problem(perceptron, mean_square, lambda: rows(32), ranks=2),
    property=in_order,
)
