"""Synchronized BatchNorm: output, gradients and running statistics of each rank are those of the whole batch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from regression import assert_same
from torch import Tensor, nn

from evener.strategies.distributed.wrapper import SyncBatchNorm

SHARES = (3, 4, 0)  # samples of each rank; a rank without samples runs some other's with weight 0
CASES: dict[str, tuple[nn.Module, tuple[int, ...], dict[str, Any]]] = {
    "rows": (nn.BatchNorm1d(4), (), {}),
    "sequences": (nn.BatchNorm1d(4, momentum=None), (5,), {}),
    "images": (nn.BatchNorm2d(4), (3, 2), {"memory_format": torch.channels_last}),
    "volumes": (nn.BatchNorm3d(4, affine=False, track_running_stats=False), (2, 2, 1), {}),
}


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A layer, the whole batch, and what the loss weighs its output with."""
    layer, shape, options = CASES[name]
    layer = layer.double()
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    batch = (10 + torch.randn(sum(SHARES), 4, *shape, dtype=torch.float64)).to(**options)
    return layer, batch, torch.randn_like(batch)


def gradients(layer: nn.Module, x: Tensor, factors: Tensor, weight: float = 1.0) -> dict[str, Tensor]:
    """Output, gradients, those of a penalty on the gradient, and what the layer tracks."""
    layer(x + 1)  # so that a cumulative average has two batches
    x = x.clone().requires_grad_()
    output = layer(x)
    inputs = [x, *layer.parameters()]
    loss = (output.square() * factors).sum() * weight
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    (penalized,) = torch.autograd.grad(loss, x, create_graph=True)
    second = torch.autograd.grad(penalized.square().sum() * weight, inputs)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    found = {f"first {name}": value for name, value in zip(names, first, strict=True)}
    found |= {f"second {name}": value for name, value in zip(names, second, strict=True)}
    return {"output": output.detach(), **found, **layer.state_dict()}


def _results() -> dict[str, dict[str, Tensor]]:
    rank, found = dist.get_rank(), {}
    for name in CASES:
        layer, batch, factors = made(name)
        SyncBatchNorm().apply(layer)
        x, own = batch.split(SHARES)[rank], factors.split(SHARES)[rank]
        if not SHARES[rank]:
            layer.counts, x, own = False, batch[:1] + 5, factors[:1]
        found[name] = gradients(layer, x, own, float(bool(SHARES[rank])))
    return found


def test_ranks_find_what_one_device_finds(ranks: list[Any]) -> None:
    for name in CASES:
        for key, value in gradients(*made(name)).items():
            found = [results[name][key] for results, _ in ranks]
            if key == "output" or key.endswith(" x"):
                found = [torch.cat(found[:-1])]  # the last rank's have weight 0
            elif key.startswith(("first", "second")):
                found = [torch.stack(found).sum(0)]  # DDP sums those of parameters
            for part in found:
                assert_same(part, value, 1e-10, f"{name}, {key}")


def _one_sample() -> str:
    layer = nn.BatchNorm1d(4)
    SyncBatchNorm().apply(layer)
    layer.counts = dist.get_rank() == 0
    with pytest.raises(ValueError, match="more than 1 value per channel") as error:
        layer(torch.ones(1, 4))
    return str(error.value)


def test_one_value_per_channel_is_refused_on_every_rank_as_by_one_device(ranks: list[Any]) -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel") as error:
        nn.BatchNorm1d(4)(torch.ones(1, 4))
    assert {message.partition(",")[0] for _, message in ranks} == {str(error.value).partition(",")[0]}


def _on_a_rank() -> Any:
    dist.init_process_group("gloo")
    return _results(), _one_sample()


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(_on_a_rank, len(SHARES))
