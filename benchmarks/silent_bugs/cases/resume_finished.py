"""Ended by `max_steps` at the end of an epoch, and started again: nothing is left to train."""

from silent_bugs.case import Case, resumed

CASE = Case(
    issue="Lightning-AI/pytorch-lightning#19617",
    wrong="trains further steps",
    problem=resumed(epochs=4, max_steps=10),
    kill_after=-1,
    compare=("seen", "weights"),
    without={"ignite": "counts epochs only"},
)
