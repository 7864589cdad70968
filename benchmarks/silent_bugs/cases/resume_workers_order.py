"""Killed after the first epoch, and resumed on two ranks with data workers: the second epoch's order."""

from dataclasses import replace

from silent_bugs.case import resumed
from silent_bugs.cases import resume_order

CASE = replace(
    resume_order.CASE,
    issue="Lightning-AI/pytorch-lightning#21938",
    wrong="goes on in the first epoch's order, which its workers have fetched before they are told the epoch",
    problem=resumed(shuffle=True, epochs=3, ranks=2, workers=2),
    kill_after=5,
)
