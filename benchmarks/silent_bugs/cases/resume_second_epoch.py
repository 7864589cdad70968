"""Killed within the second epoch, and resumed: the second epoch's order."""

from dataclasses import replace

from silent_bugs.cases import resume_order

CASE = replace(
    resume_order.CASE,
    issue="huggingface/accelerate#2016 huggingface/accelerate#4071",
    wrong="goes on in another epoch's order",
    kill_after=7,
)
