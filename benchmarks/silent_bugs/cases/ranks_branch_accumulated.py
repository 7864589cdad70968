"""The same layer, accumulated: the last of the accumulated batches may not use it."""

from dataclasses import replace

from silent_bugs.cases import ranks_branch

CASE = replace(
    ranks_branch.CASE,
    issue="pytorch/pytorch#69031",
    wrong="keeps a rank's own gradient of a layer that the last accumulated batch has not used",
    problem=replace(ranks_branch.CASE.problem, accumulate=2),
)
