"""A scheduler that a module steps itself gives every rank one device's learning rates."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks
from regression import quiet_trainer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import BalancedDDPStrategy, DDPStrategy, FSDPStrategy, SingleDeviceStrategy

STRATEGIES: dict[str, Any] = {
    "single": SingleDeviceStrategy,
    "ddp": lambda: DDPStrategy(batch_size_is="global", timeout_s=120),
    "weights": lambda: BalancedDDPStrategy([1, 3], timeout_s=120),
    "fsdp": lambda: FSDPStrategy(batch_size_is="global", timeout_s=120),
}


class Manual(pl.LightningModule):
    """Steps a plateau scheduler by its loss: in the step as it is, or as `callback_metrics` has it there or later."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Linear(3, 1).double()
        self.automatic_optimization = False
        self.reads = reads
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)
        if self.reads == "loss":
            self._decide(loss.detach())
        elif self.reads == "step":
            self._decide(self.trainer.callback_metrics["loss"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.reads == "end":
            self._decide(self.trainer.callback_metrics["loss"])
        scheduler: Any = self.lr_schedulers()
        self.rates.append(scheduler.get_last_lr()[0])

    def on_train_epoch_end(self) -> None:
        scheduler: Any = self.lr_schedulers()
        scheduler.step(1.0)  # the same on all ranks

    def _decide(self, value: Any) -> None:
        scheduler: Any = self.lr_schedulers()
        scheduler.step(value)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [ReduceLROnPlateau(optimizer, patience=0, factor=0.9)]


class OwnHook(Manual):
    """Optimizes automatically, and gives the scheduler another value than the one that is monitored."""

    def __init__(self, reads: str) -> None:
        super().__init__(reads)
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.last = loss.detach()
        return loss

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(self.last)

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = super().configure_optimizers()
        config = {"scheduler": schedulers[0], "interval": "step", "monitor": "none", "strict": False}
        return {"optimizer": optimizers[0], "lr_scheduler": {**config, "reduce_on_plateau": False}}


def _fit(strategy: str, reads: str) -> Any:
    module = (OwnHook if reads == "hook" else Manual)(reads)
    trainer = quiet_trainer(STRATEGIES[strategy](), 1 if strategy == "single" else 2)
    drawn = torch.Generator().manual_seed(0)
    x, y = (torch.randn(17, width, generator=drawn, dtype=torch.float64) for width in (3, 1))
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=4))  # one rank has no part of the last batch
    config = trainer.lr_scheduler_configs[0]
    return module.rates, type(config.scheduler) is ReduceLROnPlateau, sorted(config.scheduler.state_dict())


@pytest.mark.parametrize(
    ("strategy", "reads"),
    [("ddp", "loss"), ("ddp", "step"), ("ddp", "end"), ("weights", "step"), ("ddp", "hook"), ("fsdp", "loss")],
)
def test_a_module_that_steps_a_plateau_scheduler_has_one_devices_rates(strategy: str, reads: str) -> None:
    # Each rank stepped it by its own loss, and went on with a learning rate of its own.
    rates, is_plain, state = _fit("single", reads)
    assert len(set(rates)) > 3
    for found in run_ranks(_fit, 2, strategy, reads):
        assert found == (pytest.approx(rates, rel=1e-12), is_plain, state)
