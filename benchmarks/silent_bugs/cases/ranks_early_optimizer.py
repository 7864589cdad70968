"""An optimizer that was made before the parameters were cut over two ranks (FSDP)."""

from dataclasses import replace

from silent_bugs.cases import ranks_clipped_shards

CASE = replace(
    ranks_clipped_shards.CASE,
    issue="huggingface/accelerate#2665",
    wrong="steps parameters that the network no longer has, so that nothing is trained",
    problem=replace(ranks_clipped_shards.CASE.problem, clip=0.0, early=True),
)
