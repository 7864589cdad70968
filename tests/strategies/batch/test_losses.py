"""Losses weighted by hand, and tensors that are sent in buckets."""

from typing import Any

import pytest
import torch

from evener.strategies import ConfigError
from evener.strategies.batch.losses import ChunkLosses, chunk_losses
from evener.strategies.core.devices import broadcast_coalesced

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
