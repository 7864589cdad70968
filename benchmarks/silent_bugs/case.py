"""A case: a training that a framework may get wrong without a word, and how one tells."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from frameworks.problem import Batch, Problem
from torch import Tensor, nn
from torch.nn import functional as F

Outcomes = list[dict[str, Any]]
"""What each rank saw (`Run.end`)."""


@dataclass(frozen=True)
class Case:
    """A case.

    Args:
        issue: the public report that describes it, as owner/repository#number on GitHub; several by spaces.
        wrong: what a framework does that gets it wrong.
        problem: what is trained.
        kill_after: optimizer steps after which the training is killed, to be resumed; it must then be as if it had not
            been. -1: it ends, and is started again. 0: it is compared with a loop on one device, written by hand.
        compare: what must be equal: keys of an outcome. `val` and `loss` are what the framework reports.
        property: in place of a comparison, says of the ranks' outcomes what is wrong with them; empty if nothing is.
        again: the problem of a second training, whose outcomes follow in what `property` is given.
        without: frameworks for which the case makes no sense, and why.
        warning: words of a warning that names what is wrong.
    """

    issue: str
    wrong: str
    problem: Problem
    kill_after: int = 0
    compare: tuple[str, ...] = ("weights",)
    property: Callable[[Outcomes], str] | None = None
    again: Problem | None = None
    without: dict[str, str] = field(default_factory=dict[str, str])
    warning: str = ""


def rows(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Samples of six features and a real target."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(num, 6, generator=generator), torch.randn(num, 1, generator=generator)
    return [{"x": x[i], "labels": y[i], "i": torch.tensor(i)} for i in range(num)]


def sentences(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Sequences of nine tokens of which from one to nine have a label; the others' is -100."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 11, (num, 9), generator=generator)
    labels = torch.randint(0, 11, (num, 9), generator=generator)
    lengths = torch.randint(1, 10, (num, 1), generator=generator)
    labels[torch.arange(9) >= lengths] = -100
    return [{"x": x[i], "labels": labels[i], "i": torch.tensor(i)} for i in range(num)]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), nn.Tanh(), nn.Linear(8, 11))


def mean_square(net: Any, batch: Batch) -> Tensor:
    return F.mse_loss(net(batch["x"]), batch["labels"])


def square_errors(net: Any, batch: Batch) -> Tensor:
    return (net(batch["x"]) - batch["labels"]).square().flatten()


def token_mean(net: Any, batch: Batch, num: Any = None) -> Tensor:
    """Cross-entropy over the labels that count, divided by their number or by what the framework says."""
    logits, labels = net(batch["x"]).flatten(0, 1), batch["labels"].flatten()
    if num is None:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits, labels, reduction="sum") / num


def resumed(num: int = 20, **options: Any) -> Problem:
    """A training of batches of 4 samples, of which every step is saved."""
    return Problem(perceptron, mean_square, lambda: rows(num), batch_size=4, save=True, **options)
