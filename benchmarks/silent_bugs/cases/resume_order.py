"""Killed within the first epoch, and resumed: the shuffled samples that are left."""

from silent_bugs.case import Case, resumed

CASE = Case(
    issue="https://github.com/Lightning-AI/pytorch-lightning/issues/19764 https://github.com/huggingface/accelerate/issues/2823",
    wrong="trains on samples again and on others never",
    problem=resumed(shuffle=True, epochs=2),
    kill_after=3,
    compare=("seen", "weights"),
    warning="ended before the epoch ended",
)
