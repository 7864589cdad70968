"""A module that steps its optimizers itself trains as on one device."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from distributed import run_ranks
from regression import assert_same, quiet_trainer, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.strategies import BalancedDataParallelStrategy, DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy


class Accumulated(pl.LightningModule):
    """One optimizer that steps every second batch, plateaus, hooks of parameters, and a loss over the batch."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4)).double()
        self.seen: dict[int, float] = {}  # not a list: it would be taken for results of the steps
        self.net[0].weight.register_hook(lambda g: self.seen.update({len(self.seen): float(g.sum())}))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        z = self.net(batch[1])
        loss = F.mse_loss(z, batch[0]) + evener.over_batch(lambda z: z.std(0).sum())(z)
        self.manual_backward(loss / 2, retain_graph=False)
        if batch_idx % 2:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        return [optimizer], [ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)]


def _fit_accumulated(strategy: Any, devices: int = 1) -> tuple[Any, list[float]]:
    torch.manual_seed(3)
    module = Accumulated()
    data = TensorDataset(torch.randn(28, 4, dtype=torch.float64), torch.randn(28, 3, dtype=torch.float64))
    trainer = quiet_trainer(strategy, devices)
    trainer.fit(module, DataLoader(data, batch_size=7))
    return (weights(module), trainer.global_step), list(module.seen.values())


@pytest.mark.parametrize(
    "strategy",
    [lambda: BalancedDataParallelStrategy(gpu0_chunk=0), lambda: ModelParallelStrategy(num_microbatches=2)],
)
def test_manual_optimization_in_one_process_has_whole_batches(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    expected, sums = _fit_accumulated(SingleDeviceStrategy())
    made = strategy()
    with caplog.at_level("INFO"):
        found, seen = _fit_accumulated(made, 2)
    assert isinstance(made, ModelParallelStrategy) or "optimizes manually" in caplog.text  # the other warns
    assert_same(found, expected, 1e-10)
    assert seen[-len(sums) :] == pytest.approx(sums, abs=1e-10)  # after looks at parts


def test_manual_optimization_on_replicas_of_ranks_trains_as_on_one_device() -> None:
    expected, _ = _fit_accumulated(SingleDeviceStrategy())
    replicas = DDPStrategy(devices_per_process=2, batch_size_is="global")
    for found, _ in run_ranks(_fit_accumulated, 2, replicas, 4):
        assert_same(found, expected, 1e-10)
