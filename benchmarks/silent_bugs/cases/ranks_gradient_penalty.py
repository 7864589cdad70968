"""A penalty on the gradient by the inputs, on two ranks."""

from typing import Any

import torch
from frameworks.problem import Batch, Problem
from silent_bugs.case import Case, perceptron, rows
from torch import Tensor
from torch.nn import functional as F


def penalized(net: Any, batch: Batch) -> Tensor:
    x = batch["x"].detach().requires_grad_()
    y = net(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return F.mse_loss(y, batch["labels"]) + slope.square().sum(1).mean()


CASE = Case(
    issue="pytorch/pytorch#47562",
    wrong="leaves the gradients of a rank as they are",
    problem=Problem(perceptron, penalized, lambda: rows(32), ranks=2),
)
