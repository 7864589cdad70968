"""Losses weighted by hand, and gradients that are sent in buckets, on one thread and while backward goes on."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.strategies import ConfigError
from evener.strategies.batch.losses import ChunkLosses, chunk_losses
from evener.strategies.core.devices import broadcast_coalesced
from evener.strategies.replicas._backward import ReplicasBackward

CPU = torch.device("cpu")


def test_losses_are_weighted_by_samples() -> None:
    losses = chunk_losses([torch.tensor(1.0), {"loss": torch.tensor(4.0)}], [2, 1], "mean", "dp")
    assert losses.combine(CPU).item() == pytest.approx((1 * 2 + 4 * 1) / 3)


def test_losses_are_weighted_by_what_the_module_says() -> None:
    outputs = [
        {"loss": torch.tensor(1.0), "loss_weight": torch.tensor(30)},
        {"loss": torch.tensor(4.0), "loss_weight": 10},
    ]
    losses = chunk_losses(outputs, [1, 1], "mean", "dp")
    assert losses.combine(CPU).item() == pytest.approx((1 * 30 + 4 * 10) / 40)
    assert float(losses.total(CPU)) == 40


def test_sums_are_summed() -> None:
    assert ChunkLosses([torch.tensor(1.0), torch.tensor([4.0])], [2.0, 1.0], "sum").combine(CPU).item() == 5


@pytest.mark.parametrize(
    ("output", "found"), [(torch.zeros(2), r"shape \(2,\)"), ({"out": 1}, "type NoneType"), (None, "type NoneType")]
)
def test_a_loss_that_is_no_scalar_is_refused(output: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=f"dp: training_step returned a loss of {found} for a chunk of 4 samples"):
        chunk_losses([output], [4], "mean", "dp")


def modules(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    root = nn.Sequential(
        nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3), nn.Linear(3, 2).half().float(), nn.Linear(3, 1)
    )
    copies: list[nn.Module] = [root]
    for _ in range(count - 1):
        copy = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(3, 1))
        copy.load_state_dict(root.state_dict())
        copies.append(copy)
    return copies


def loss(module: Any, x: Tensor) -> Tensor:
    hidden = module[1](module[0](x))
    return (module[2](hidden).sum() + module[3](hidden).sum()) * x.sum()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 40, 2**20])
def test_gradients_of_all_replicas_are_summed_onto_the_root(overlap: bool, bucket_bytes: int) -> None:
    root, *others = replicas = modules(3)
    parameters = [list(module.parameters()) for module in replicas]
    whole = ReplicasBackward(parameters, overlap=overlap, bucket_bytes=bucket_bytes)
    chunks = [torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([3, 3, 4])]
    for _ in range(2):  # the second time onto gradients that are there
        losses = [loss(module, chunk) for module, chunk in zip(replicas, chunks, strict=True)]
        whole.attach(torch.stack(losses).sum()).backward()
        assert all(p.grad is None for module in others for p in module.parameters())
    whole.close()
    found = [p.grad.to_dense() for p in root.parameters() if p.grad is not None]
    root.zero_grad()
    torch.stack([loss(root, chunk) for chunk in chunks * 2]).sum().backward()
    torch.testing.assert_close(found, [p.grad.to_dense() for p in root.parameters() if p.grad is not None])
    assert len(found) == 7


@pytest.mark.parametrize("bucket_bytes", [1, 30, 2**20])
def test_a_coalesced_copy_between_devices_is_exact(bucket_bytes: int) -> None:
    """`meta` stands for another device in the transfer; the values are checked on one device."""
    sources = [torch.arange(6.0).view(2, 3), torch.arange(3), torch.tensor(2.0), torch.arange(4.0, dtype=torch.float64)]
    targets = [torch.zeros_like(source) for source in sources]
    broadcast_coalesced(sources, [targets], bucket_bytes)
    torch.testing.assert_close(targets, sources, rtol=0, atol=0)
    broadcast_coalesced(
        sources, [[target.to("meta") for target in targets]], bucket_bytes
    )  # buckets, and one dtype in each
