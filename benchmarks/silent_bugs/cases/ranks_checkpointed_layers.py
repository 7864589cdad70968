"""Layers whose activations are computed again in the backward pass, on two ranks."""

from frameworks.problem import Problem
from silent_bugs.case import Case, mean_square, rows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x, use_reentrant=False).tanh()
        return checkpoint(self.last, hidden, use_reentrant=False)


CASE = Case(
    issue="pytorch/pytorch#109191",
    wrong="leaves the gradients of a rank as they are",
    problem=Problem(Checkpointed, mean_square, lambda: rows(32), ranks=2),
)
