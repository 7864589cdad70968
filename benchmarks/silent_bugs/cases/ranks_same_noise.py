"""Noise that the dataset adds, on two ranks with one seed."""

from typing import Any

import torch
from frameworks.problem import Problem
from silent_bugs.case import Case, Outcomes, mean_square, perceptron, rows
from torch.utils.data import Dataset


class Noise(Dataset[Any]):
    """Samples that are nothing but noise."""

    def __init__(self, num: int) -> None:
        self.samples = rows(num)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        return {**self.samples[i], "x": torch.randn(6)}


def differ(outcomes: Outcomes) -> str:
    first, second = ({value for batch in outcome["inputs"] for value in batch} for outcome in outcomes[:2])
    return f"{len(first & second)} of {len(first)} samples have the same noise on both ranks" if first & second else ""


CASE = Case(
    issue="Lightning-AI/pytorch-lightning#16166 huggingface/transformers#37932",
    wrong="draws the same augmentations on all ranks",
    problem=Problem(perceptron, mean_square, lambda: Noise(32), ranks=2),
    property=differ,
)
