"""Killed within the first of three epochs, and resumed: the order of the epochs after the resumed one."""

from dataclasses import replace

from silent_bugs.case import resumed
from silent_bugs.cases import resume_order

CASE = replace(
    resume_order.CASE,
    issue="huggingface/accelerate#4233",
    wrong="repeats the resumed epoch's order in the next",
    problem=resumed(shuffle=True, epochs=3),
    kill_after=2,
)
