"""`evener.mean`: a mean that divides by the sum of its weights."""

import pytest
import torch
from torch import Tensor

import evener


def _values() -> Tensor:
    return torch.tensor([[1.0, 2.0], [3.0, 10.0]], dtype=torch.float64, requires_grad=True)


def test_a_mean_without_weights_divides_by_the_number_of_values() -> None:
    values = _values()
    loss = evener.mean(values)
    loss.backward()
    assert loss.item() == 4.0
    assert values.grad is not None
    assert values.grad.tolist() == [[0.25, 0.25], [0.25, 0.25]]


def test_a_weighted_mean_divides_by_the_sum_of_its_weights() -> None:
    values = _values()
    loss = evener.mean(values, weight=torch.tensor([[1, 0], [2, 1]]))
    loss.backward()
    assert loss.item() == (1 + 2 * 3 + 10) / 4
    assert values.grad is not None
    assert values.grad.tolist() == [[0.25, 0.0], [0.5, 0.25]]


def test_a_weight_per_row_counts_for_every_value_of_the_row() -> None:
    loss = evener.mean(_values(), weight=torch.tensor([[True], [False]]))
    assert loss.item() == 1.5


@pytest.mark.parametrize("weight", [torch.zeros(2), torch.zeros(2, dtype=torch.bool)])
def test_a_mean_that_counts_nothing_is_zero_with_zero_gradients(weight: Tensor) -> None:
    values = _values()
    loss = evener.mean(values, weight=weight)
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert evener.mean(values[:0]).item() == 0.0


def test_a_value_with_weight_zero_counts_for_nothing_even_if_it_is_nan() -> None:
    loss = evener.mean(torch.tensor([1.0, torch.nan], requires_grad=True), weight=torch.tensor([1.0, 0.0]))
    assert loss.item() == 1.0


def test_counted_integers_have_a_mean() -> None:
    assert evener.mean(torch.tensor([True, True, False, False])).item() == 0.5


def test_half_precision_neither_overflows_nor_changes_its_type() -> None:
    values = torch.full((70_000,), 2.0, dtype=torch.float16, requires_grad=True)
    loss = evener.mean(values, weight=torch.ones(70_000, dtype=torch.bool))
    loss.backward()
    assert (loss.item(), loss.dtype) == (2.0, torch.float16)
    assert values.grad is not None
    assert values.grad.dtype == torch.float16


def test_second_derivatives_pass() -> None:
    weight = torch.tensor([1.0, 3.0], dtype=torch.float64)
    x = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: evener.mean(x**3, weight=weight), (x,))


def test_a_mean_computes_without_a_graph() -> None:
    with torch.no_grad():
        assert evener.mean(_values()).item() == 4.0


def test_weights_that_require_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight requires a gradient.*Pass weight.detach\(\)"):
        evener.mean(_values(), weight=torch.ones(2, requires_grad=True))


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \(3,\), which does not broadcast to that of values"):
        evener.mean(_values(), weight=torch.ones(3))


def test_a_mode_of_torch_sees_the_mean() -> None:
    seen: list[object] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        evener.mean(_values())
    assert evener.mean in seen
