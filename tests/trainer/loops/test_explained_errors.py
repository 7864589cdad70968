"""Errors of torch that name neither the module nor what to change say so."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from tiny import Tiny, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Detached(Tiny):
    def __init__(self, num_layers: int = 1) -> None:
        super().__init__()
        del self.layer
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(num_layers))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return sum((layer(batch[0]).mean() for layer in self.layers), batch[0].mean()).detach()


def fit(module: pl.LightningModule, **options: Any) -> None:
    quiet(**options).fit(module, DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=4))


@pytest.mark.parametrize("options", [{"devices": 1}, {"strategy": "dp", "devices": ["cpu", "cpu"]}, {"lean": False}])
def test_a_loss_without_a_gradient_is_explained(options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"^The loss has no gradient: it was detached.* Return the loss as"):
        fit(Detached(), **options)


def test_an_optimizer_without_parameters_is_explained() -> None:
    with pytest.raises(ValueError, match=r"^configure_optimizers gave an optimizer no parameters\. Create"):
        fit(Detached(num_layers=0))


@pytest.mark.long
def test_ddp_refuses_a_module_without_parameters() -> None:
    with pytest.raises(Exception, match="ddp: Detached has no parameter that requires a gradient, so there is"):
        fit(Detached(num_layers=0), strategy="ddp", devices=2)


class Fails(Detached):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def training_step(self, batch: list[Tensor]) -> Tensor:
        raise RuntimeError(self.text)


@pytest.mark.parametrize(
    "text",
    [
        # it was told as a full disk
        "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)",
        "Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise it.",
    ],
)
def test_too_little_shared_memory_for_data_workers_is_explained(text: str) -> None:
    told = r"^The data workers need more shared memory \(/dev/shm\) .*num_workers=0 \("
    with pytest.raises(RuntimeError, match=told):
        fit(Fails(text))
