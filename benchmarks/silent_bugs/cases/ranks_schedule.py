"""A learning rate that falls by steps, on two ranks."""

import torch
from frameworks.problem import Problem
from silent_bugs.case import Case, mean_square, perceptron, rows

CASE = Case(
    issue="huggingface/accelerate#2773",
    wrong="steps the scheduler once per rank, so that the learning rate falls twice as fast",
    problem=Problem(
        perceptron, mean_square, lambda: rows(48), ranks=2,
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    ),
)  # fmt: skip
