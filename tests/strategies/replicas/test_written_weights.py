"""Replicas compute with the root's weights, whenever and however an optimizer writes to them."""

from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from parity import Case, Net, TiedNet, assert_equal, baseline, run

from evener.strategies import DataParallelStrategy, SingleDeviceStrategy
from evener.trainer import Trainer


class Sharp(torch.optim.SGD):
    """Sharpness-aware: climbs through `parameter.data`, computes again, and descends from where it was."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.data.clone() for p in parameters]
        for p in parameters:
            p.data.add_(p.grad, alpha=0.5)
        closure()
        for p, old in zip(parameters, before, strict=True):
            p.data.copy_(old)
        super().step()
        return loss


class Climbs(Net):
    def configure_optimizers(self) -> Any:
        return Sharp(self.parameters(), lr=0.1)


class Frozen(TiedNet):
    """With a frozen layer, which is written to in one of the ways after the fourth step."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = write

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 4:
            self.halve()

    @torch.no_grad()
    def halve(self) -> None:
        if self.write == "data is set":
            self.frozen.weight.data = self.frozen.weight.data * 0.5
        else:
            self.frozen.weight.data.mul_(0.5)


class Average(pl.Callback):
    """Moves weights after each batch, and exchanges them for an evaluation."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data.mul_(0.9)

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        for parameter in module.parameters():
            parameter.data.mul_(2)

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        for parameter in module.parameters():
            parameter.data.div_(2)


CASES = {
    **{
        f"frozen, {write}": Case(partial(Frozen, write), num=40, trainer={"max_epochs": 1})
        for write in ("data", "data is set")
    },
    "average": Case(trainer={"callbacks": [Average()]}),
    "climbs": Case(Climbs, num=22, trainer={"accumulate_grad_batches": 2}),
    "climbs in a part": Case(Climbs, strategy={"submodule": "net"}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("trainer", [Trainer, pl.Trainer])
def test_weights_written_between_two_forward_passes_are_copied(name: str, trainer: Any) -> None:
    """No version shows `parameter.data.add_`: the second forward ran with the first one's weights, and those without
    gradients were copied after optimizer steps only."""
    case = CASES[name]
    expected = baseline(case) if trainer is Trainer else run(case, SingleDeviceStrategy(), trainer, devices=1)
    assert_equal(run(case, DataParallelStrategy(**case.strategy), trainer, devices=2), expected, 1e-10)
