"""Class weights, accumulated: cross-entropy divides by the weights of the small batch's targets."""

from dataclasses import replace

from silent_bugs.cases import ranks_class_weights

CASE = replace(
    ranks_class_weights.CASE,
    issue="pytorch/pytorch#72047",
    wrong="averages the accumulated batches' weighted means as if their weights summed to the same",
    problem=replace(ranks_class_weights.CASE.problem, ranks=1, accumulate=2),
)
