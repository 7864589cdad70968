"""`static_graph=True` with manual optimization, on two ranks."""

from dataclasses import replace

from silent_bugs.cases import ranks_static_graph

CASE = replace(
    ranks_static_graph.CASE,
    issue="Lightning-AI/pytorch-lightning#18086",
    wrong="does not average the gradients of the first step",
    problem=replace(ranks_static_graph.CASE.problem, manual=True),
    without=dict.fromkeys(("accelerate", "transformers", "ignite"), "has no such mode"),
)
