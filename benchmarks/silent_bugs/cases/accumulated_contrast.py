"""A contrastive loss, accumulated: negatives come from the small batch, not from the whole one."""

from typing import Any

import torch
from frameworks.problem import Batch, Problem
from silent_bugs.case import Case, rows
from torch import Tensor, nn
from torch.nn import functional as F


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def in_batch_negatives(net: Any, batch: Batch) -> Tensor:
    first, second = (F.normalize(z, dim=1) for z in net(batch["x"].unflatten(1, (2, 3))).unbind(1))
    return F.cross_entropy(first @ second.T * 5, torch.arange(len(first)))


CASE = Case(
    issue="huggingface/sentence-transformers#2428",
    wrong="compares each sample with those of its own small batch only",
    problem=Problem(encoder, in_batch_negatives, lambda: rows(32), accumulate=2),
)
