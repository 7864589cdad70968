"""`static_graph=True` with accumulation, on two ranks."""

from dataclasses import replace

from silent_bugs.cases import ranks_static_graph

CASE = replace(
    ranks_static_graph.CASE,
    issue="huggingface/accelerate#3679 pytorch/pytorch#187732",
    wrong="stops averaging gradients from the second step on, or crashes in the first",
    problem=replace(ranks_static_graph.CASE.problem, accumulate=2),
)
