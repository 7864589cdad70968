"""Killed within the first epoch, and resumed: the shuffled samples that are left."""

from silent_bugs.case import Case, resumed

CASE = Case(
    issue="Lightning-AI/pytorch-lightning#19764 huggingface/accelerate#2823",
    wrong="trains on samples again and on others never",
    problem=resumed(shuffle=True, epochs=2),
    kill_after=3,
    compare=("seen", "weights"),
    warning="ended before the epoch ended",
)
