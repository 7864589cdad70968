"""Killed within the second epoch, and resumed: the second epoch's order."""

from dataclasses import replace

from silent_bugs.cases import resume_order

CASE = replace(
    resume_order.CASE,
    issue="https://github.com/huggingface/accelerate/issues/2016 https://github.com/huggingface/accelerate/pull/4071",
    wrong="goes on in another epoch's order",
    kill_after=7,
)
