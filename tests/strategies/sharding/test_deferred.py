"""A module that is built without its large tensors gets the values that it would have had."""

import pytest
import torch
from torch import nn

from evener.strategies import ConfigError
from evener.strategies.sharding.deferred import DeferredTensors


def _small_and_large() -> nn.Module:
    module = nn.Sequential(
        nn.Linear(80, 90), nn.Linear(9, 9), nn.Embedding(100, 80), nn.LayerNorm(5000), nn.LSTM(40, 40), nn.Dropout()
    )
    with torch.no_grad():
        module[0].weight *= 0.5
        module[0].weight[3:60] += torch.rand(80)
    nn.init.trunc_normal_(module[2].weight, std=0.02)
    nn.init.orthogonal_(module[4].weight_ih_l0)
    module.register_buffer("mask", torch.ones(80, 80).tril())
    module.register_buffer("tail", torch.randn(70, 70) * 2)
    return module.double()


def test_values_are_those_of_a_module_built_at_once() -> None:
    torch.manual_seed(0)
    expected = _small_and_large()
    after = torch.rand(3)
    torch.manual_seed(0)
    with DeferredTensors() as deferred:
        built = _small_and_large()
    deferred.to_meta(built)
    torch.testing.assert_close(torch.rand(3), after, rtol=0, atol=0)  # the random stream went on
    for name, tensor in expected.state_dict().items():
        found = built.get_submodule(name.rpartition(".")[0]).__getattr__(name.rpartition(".")[2])
        assert found.is_meta == (tensor.numel() >= 4096), name
        value = deferred.value(found) if found.is_meta else found
        torch.testing.assert_close(value, tensor, rtol=0, atol=1e-12, msg=lambda text: f"{name}: {text}")  # noqa: B023


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
