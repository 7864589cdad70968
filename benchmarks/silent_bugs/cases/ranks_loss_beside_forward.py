"""A loss that calls a method of the network other than `forward`, on two ranks."""

from typing import Any

from frameworks.problem import Batch, Problem
from silent_bugs.case import Case, rows
from torch import Tensor, nn
from torch.nn import functional as F


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def score(self, x: Tensor) -> Tensor:
        return self.layer(x)


def beside_forward(net: Any, batch: Batch) -> Tensor:
    return F.mse_loss(net.score(batch["x"]), batch["labels"])


CASE = Case(
    issue="huggingface/trl#7245",
    wrong="does not average the gradients at all: each rank trains its own weights",
    problem=Problem(Scorer, beside_forward, lambda: rows(32), ranks=2, unwrapped=True),
)
