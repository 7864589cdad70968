"""Divergence from a teacher per valid token, accumulated on two ranks."""

from typing import Any

import torch
from frameworks.problem import Batch, Problem
from silent_bugs.case import Case, language_model, sentences
from torch import Tensor
from torch.nn import functional as F


def divergence(net: Any, batch: Batch) -> Tensor:
    valid = (batch["labels"] != -100).double()
    teacher = F.one_hot(batch["labels"].clamp(min=0), 11) * 0.9 + 0.1 / 11
    each = F.kl_div(net(batch["x"]).log_softmax(-1), teacher.to(torch.float64), reduction="none").sum(-1)
    return (each * valid).sum() / valid.sum()


CASE = Case(
    issue="modelscope/ms-swift#10165",
    wrong="averages means over batches and ranks with different numbers of valid tokens",
    problem=Problem(language_model, divergence, lambda: sentences(32), ranks=2, accumulate=2),
)
