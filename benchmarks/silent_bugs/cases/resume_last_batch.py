"""Killed within an epoch and resumed, samples in order: the batch that was trained last."""

from silent_bugs.case import Case, resumed

CASE = Case(
    issue="Lightning-AI/pytorch-lightning#19815 Lightning-AI/pytorch-lightning#19367",
    wrong="trains batches again whose optimizer step is in the weights",
    problem=resumed(epochs=2),
    kill_after=2,
    compare=("seen", "weights"),
    warning="ended before the epoch ended",
)
