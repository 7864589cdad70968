"""`evener.mean`: a mean that divides by the sum of its weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

import evener

VALUES = torch.tensor([[1.0, 2.0], [3.0, 10.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("weight", "expected", "gradient"),
    [
        (None, 4.0, [[0.25, 0.25], [0.25, 0.25]]),
        (torch.tensor([[1, 0], [2, 1]]), (1 + 2 * 3 + 10) / 4, [[0.25, 0.0], [0.5, 0.25]]),
        (torch.tensor([[True], [False]]), 1.5, [[0.5, 0.5], [0.0, 0.0]]),  # a weight per row
        (torch.zeros(2), 0.0, [[0.0, 0.0], [0.0, 0.0]]),  # which counts nothing
    ],
)
def test_a_mean_divides_by_the_sum_of_its_weights(weight: Tensor | None, expected: float, gradient: Any) -> None:
    values = VALUES.clone().requires_grad_()
    loss = evener.mean(values, weight=weight)
    loss.backward()
    assert loss.item() == expected
    assert values.grad is not None
    assert values.grad.tolist() == gradient


def test_what_counts_nothing_is_left_out_and_integers_have_a_mean() -> None:
    assert evener.mean(VALUES[:0]).item() == 0.0
    assert evener.mean(torch.tensor([1.0, torch.nan]), weight=torch.tensor([1.0, 0.0])).item() == 1.0
    assert evener.mean(torch.tensor([True, True, False, False])).item() == 0.5


def test_half_precision_neither_overflows_nor_changes_its_type() -> None:
    values = torch.full((70_000,), 2.0, dtype=torch.float16, requires_grad=True)
    loss = evener.mean(values, weight=torch.ones(70_000, dtype=torch.bool))
    loss.backward()
    assert (loss.item(), loss.dtype) == (2.0, torch.float16)
    assert values.grad is not None
    assert values.grad.dtype == torch.float16


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(2, requires_grad=True), r"weight requires a gradient.*Pass weight.detach\(\)"),
        (torch.ones(3), r"weight has shape \(3,\), which does not broadcast to that of values"),
    ],
)
def test_weights_that_cannot_be_honoured_are_refused(weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evener.mean(VALUES, weight=weight)
