"""A module that is built without its large tensors gets the values that it would have had."""

import pytest
import torch
from torch import nn

from evener.strategies import ConfigError
from evener.strategies.sharding.deferred import DeferredTensors


def test_a_number_that_is_read_is_that_of_the_values() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(80, 80).weight.sum().item()
    torch.manual_seed(0)
    with DeferredTensors():
        assert nn.Linear(80, 80).weight.sum().item() == pytest.approx(expected, abs=1e-5)


def test_a_shape_that_depends_on_values_is_refused() -> None:
    with DeferredTensors(), pytest.raises(ConfigError, match=r"the shape of what configure_model computes"):
        nn.Linear(80, 80).weight.nonzero()


def test_a_tensor_without_values_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a parameter is on the meta device, so that it has no values"):
        DeferredTensors().value(torch.empty(5, device="meta"))
