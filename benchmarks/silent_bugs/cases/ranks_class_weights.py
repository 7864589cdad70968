"""Class weights on two ranks: cross-entropy divides by the weights of its targets."""

from typing import Any

import torch
from frameworks.problem import Batch, Problem
from silent_bugs.case import Case, language_model, sentences
from torch import Tensor
from torch.nn import functional as F


def weighted(net: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch["x"]).flatten(0, 1), batch["labels"].flatten(), weight=torch.linspace(0.1, 3, 11))


CASE = Case(
    issue="pytorch/pytorch#31579",
    wrong="averages the ranks' weighted means as if their weights summed to the same",
    problem=Problem(language_model, weighted, lambda: sentences(32), ranks=2),
)
