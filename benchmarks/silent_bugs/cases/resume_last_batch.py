"""Killed within an epoch and resumed, samples in order: the batch that was trained last."""

from silent_bugs.case import Case, resumed

CASE = Case(
    issue="https://github.com/Lightning-AI/pytorch-lightning/issues/19815 https://github.com/Lightning-AI/pytorch-lightning/issues/18060",
    wrong="trains batches again whose optimizer step is in the weights",
    problem=resumed(epochs=2),
    kill_after=2,
    compare=("seen", "weights"),
    warning="ended before the epoch ended",
)
