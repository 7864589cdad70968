"""The order of the work on every stage: as it is drawn by hand, and as whole runs have it.

Micro-batches overlap in the schedule's order; where that would go wrong they run one by one: test_early_gradients.py.
"""

from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from regression import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.strategies import ModelParallelStrategy
from evener.strategies.pipeline.microbatches import Task, stage_order
from evener.strategies.pipeline.stages import ScheduleName

SCHEDULES: list[ScheduleName] = ["1f1b", "gpipe"]


@pytest.mark.parametrize(
    ("name", "num_microbatches", "table"),
    [
        ("1f1b", 3, ["F0 B0 F1 B1 F2 B2"]),
        ("1f1b", 4, ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        ("1f1b", 4, ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        ("gpipe", 4, ["F0 F1 F2 F3 B3 B2 B1 B0", "F0 F1 F2 F3 B3 B2 B1 B0"]),
    ],
)
def test_a_schedule_equals_the_table(name: ScheduleName, num_microbatches: int, table: list[str]) -> None:
    orders = [stage_order(name, num_microbatches, len(table), stage) for stage in range(len(table))]
    assert [" ".join(f"{task.phase}{task.microbatch}" for task in order) for order in orders] == table


class Tell(torch.autograd.Function):
    """The identity, which tells forward and backward to a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tell: Any) -> Tensor:
        ctx.tell = partial(tell, round(x[0].item()))
        ctx.tell("F")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.tell("B")
        return grads[0], None


class Stage(nn.Module):
    """Tells who is on it; a micro-batch is one sample, which is its number."""

    def __init__(self, tell: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.tell = [tell]

    def forward(self, x: Tensor) -> Tensor:
        return Tell.apply(x * self.scale, self.tell[0])


class Told(pl.LightningModule):
    """Notes, by step, the tasks and the gradients of its stages."""

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.orders: list[list[Task]] = []
        self.gradients: list[list[float]] = []
        self.stages = nn.Sequential(*(Stage(partial(self.tell, stage)) for stage in range(num_stages)))

    def tell(self, stage: int, microbatch: int, phase: Any) -> None:
        self.orders[-1].append(Task(phase, microbatch, stage))

    def on_train_batch_start(self, *_: Any) -> None:
        self.orders.append([])

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return nn.functional.dropout(self.stages(batch), 0.5).mean()  # random numbers don't keep it from overlapping

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.gradients.append([float(stage.scale.grad) for stage in self.stages])  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fitted(module: Told, num_microbatches: int, schedule: ScheduleName = "1f1b") -> Told:
    """Three steps, of which the first is watched, and runs in order."""
    strategy = ModelParallelStrategy(num_microbatches=num_microbatches, schedule=schedule, optimizer_copies=0)
    data: Any = [torch.arange(float(num_microbatches))] * 3
    quiet_trainer(strategy, len(module.stages), max_epochs=1).fit(module, DataLoader(data, batch_size=None))
    return module


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_stages", "num"), [(2, 4), (4, 5), (3, 2)])
def test_every_stage_serves_in_the_order_of_the_schedule(num_stages: int, num: int, schedule: ScheduleName) -> None:
    for order in fitted(Told(num_stages), num, schedule).orders[1:]:
        for stage in range(num_stages):
            assert [task for task in order if task.stage == stage] == stage_order(schedule, num, num_stages, stage)


class Fails(Told):
    """Fails in the second step, backward."""

    def tell(self, stage: int, microbatch: int, phase: Any) -> None:
        super().tell(stage, microbatch, phase)
        if len(self.orders) == 2 and (stage, microbatch, phase) == (0, 1, "B"):
            raise ValueError("broken")


def test_a_failed_backward_is_named() -> None:
    with pytest.raises(ValueError, match=r"broken \[backward of micro-batch 2 of 3, 1 of 3 samples, on cpu"):
        fitted(Fails(2), 3)


class Skipping(Told):
    """Passes over stage 1, and comes back to it, and to stage 0."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for stage in (2, 1, 0, 2):
            x = self.stages[stage](x)
        return x.mean()


def test_a_micro_batch_may_pass_over_a_stage_and_come_back_to_it() -> None:
    # the mean of x·s₀·s₁·s₂² over x = 0, ..., 4
    assert fitted(Skipping(3), 5).gradients == [[2.0, 2.0, 4.0]] * 3


class Penalized(Told):
    """A step that differentiates by its input goes backward through the stages before it has been forward."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.stages(x).sum(), x, create_graph=True)
        return (self.stages(x) + slope.square()).mean()


def test_gradients_that_a_step_computes_itself_take_no_turns() -> None:
    # d/ds of the mean of x·s·s' + (s·s')² is that of x + 2 over x = 0, 1, 2, 3
    assert fitted(Penalized(2), 4).gradients == [[3.5, 3.5]] * 3
