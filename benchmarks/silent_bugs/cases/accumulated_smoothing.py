"""Label smoothing, accumulated: a mean over the labels that count and over the vocabulary."""

from typing import Any

from frameworks.problem import Batch, Problem
from silent_bugs.case import Case, language_model, sentences
from torch import Tensor
from torch.nn import functional as F


def smoothed(net: Any, batch: Batch, num: Any = None) -> Tensor:
    reduction = "mean" if num is None else "sum"
    logits, labels = net(batch["x"]).flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, label_smoothing=0.1, reduction=reduction) / (num or 1)


CASE = Case(
    issue="huggingface/transformers#46731",
    wrong="divides by the labels of a small batch, not by those of the accumulated one",
    problem=Problem(language_model, smoothed, lambda: sentences(32), accumulate=2, tokens=True),
)
