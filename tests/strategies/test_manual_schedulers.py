"""A scheduler that a module steps itself gives every rank one device's learning rates."""

from typing import Any

import pytest
import torch
from distributed import run_ranks
from regression import Net, Numbered, quiet_trainer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from evener.strategies import BalancedDDPStrategy, DDPStrategy, FSDPStrategy, SingleDeviceStrategy

STRATEGIES: dict[str, Any] = {
    "single": SingleDeviceStrategy,
    "ddp": lambda: DDPStrategy(batch_size_is="global", timeout_s=120),
    "weights": lambda: BalancedDDPStrategy([1, 3], timeout_s=120),
    "fsdp": lambda: FSDPStrategy(batch_size_is="global", timeout_s=120),
}


class Stepping(Net):
    """Steps a plateau scheduler by its loss: in the step as it is, as `callback_metrics` has it there or at the batch's
    end, or in its own hook, which gets another value than the one that is monitored. All but the last by hand."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.automatic_optimization = reads == "hook"
        self.reads = reads
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.last = loss.detach()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)
        if self.reads != "end":
            scheduler: Any = self.lr_schedulers()
            scheduler.step(self.last if self.reads == "loss" else self.trainer.callback_metrics["loss"])
        return None

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(self.last)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        scheduler: Any = self.lr_schedulers()
        if self.reads == "end":
            scheduler.step(self.trainer.callback_metrics["loss"])
        self.rates.append(scheduler.get_last_lr()[0])

    def on_train_epoch_end(self) -> None:
        scheduler: Any = self.lr_schedulers()
        scheduler.step(1.0)  # the same on all ranks

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
        config = {"scheduler": scheduler, "interval": "step", "monitor": "none", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": {**config, "reduce_on_plateau": False}}


def _fit(strategy: str, reads: str) -> Any:
    module = Stepping(reads)
    trainer = quiet_trainer(STRATEGIES[strategy](), 1 if strategy == "single" else 2, limit_val_batches=0)
    trainer.fit(module, DataLoader(Numbered(17), batch_size=4))  # one rank has no part of the last batch
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
