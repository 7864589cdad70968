"""Killed after the last step of an epoch, and resumed."""

from dataclasses import replace

from silent_bugs.cases import resume_last_batch

CASE = replace(
    resume_last_batch.CASE,
    issue="Lightning-AI/pytorch-lightning#19403",
    wrong="makes a step of the epoch that was over",
    kill_after=5,
    compare=("seen", "weights", "steps"),
)
