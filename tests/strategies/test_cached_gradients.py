"""Gradients of embeddings are cached, and go backward through the network in chunks: each chunk's counts once."""

from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from regression import quiet_trainer, weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import ConfigError, DataParallelStrategy, DDPStrategy, FSDPStrategy, SingleDeviceStrategy

CHUNK = 2


class Cached(pl.LightningModule):
    """Compares pairs; `compares` all samples of a batch, too. Chunks go backward singly, or in a hook of the loss."""

    def __init__(self, manual: bool, compares: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.automatic_optimization, self.compares = not manual, compares

    def loss(self, embeddings: Tensor) -> Tensor:
        a, b = embeddings.unbind(1)
        return F.cross_entropy(a @ b.T, torch.arange(len(a))) if self.compares else (a - b).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        chunks = batch[0].unflatten(1, (2, 3)).split(CHUNK)
        with torch.no_grad():
            embeddings = torch.cat([self.net(chunk) for chunk in chunks])
        loss = self.loss(embeddings.requires_grad_())
        gradients = torch.autograd.grad(loss, embeddings)[0].split(CHUNK)
        if self.automatic_optimization:
            loss = loss.detach().requires_grad_()
            loss.register_hook(partial(self.through, chunks, gradients))
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for chunk, gradient in zip(chunks, gradients, strict=True):
            self.manual_backward((self.net(chunk) * gradient).sum())
        optimizer.step()
        return None

    def through(self, chunks: Any, gradients: Any, scale: Tensor) -> None:
        with torch.enable_grad():
            for chunk, gradient in zip(chunks, gradients, strict=True):
                (self.net(chunk) * gradient * scale).sum().backward()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(strategy: Any, devices: int, batch: int, manual: bool, compares: bool) -> Tensor:
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(24, 6, dtype=torch.float64)), batch)
    module = Cached(manual, compares)
    quiet_trainer(strategy(), devices, max_epochs=1).fit(module, loader)
    return weights(module)


FORMS = [(manual, compares) for manual in (False, True) for compares in (False, True)]


def train_all(strategy: Any, devices: int, batch: int, forms: Any = FORMS) -> list[Tensor]:
    return [train(strategy, devices, batch, *form) for form in forms]


@pytest.mark.parametrize(
    ("strategy", "ranks", "forms"),
    [(DataParallelStrategy, 1, FORMS), (DDPStrategy, 2, FORMS), (FSDPStrategy, 2, FORMS[2:])],
)
def test_every_chunk_trains_as_on_one_device(strategy: Any, ranks: int, forms: Any) -> None:
    expected = train_all(SingleDeviceStrategy, 1, 8, forms)
    for found in run_ranks(train_all, ranks, strategy, 2, 8 // ranks, forms):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def refused() -> str:
    with pytest.raises(ConfigError) as error:
        train(FSDPStrategy, 2, 4, manual=False, compares=False)
    return str(error.value)


def test_shards_refuse_gradients_that_a_hook_computes() -> None:
    for said in run_ranks(refused, 2):
        assert "the loss has no graph, so that hooks compute the gradients" in said
