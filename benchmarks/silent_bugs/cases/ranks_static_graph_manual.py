"""`static_graph=True` with manual optimization, on two ranks."""

from dataclasses import replace

from silent_bugs.cases import ranks_static_graph

CASE = replace(
    ranks_static_graph.CASE,
    issue="https://github.com/Lightning-AI/pytorch-lightning/issues/18086",
    wrong="does not average the gradients of the first step",
    problem=replace(ranks_static_graph.CASE.problem, manual=True),
    without={name: "has no such mode" for name in ("accelerate", "transformers", "ignite")},
)
