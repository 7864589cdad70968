"""Killed after an epoch, and resumed: the random numbers of dropout."""

from dataclasses import replace

from silent_bugs.cases import resume_last_batch
from torch import nn


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))


CASE = replace(
    resume_last_batch.CASE,
    issue="Lightning-AI/pytorch-lightning#17543",
    wrong="draws the first epoch's random numbers again",
    problem=replace(resume_last_batch.CASE.problem, net=with_dropout),
    kill_after=5,
    compare=("weights",),
)
