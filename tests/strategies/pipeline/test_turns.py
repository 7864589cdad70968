"""Whole runs: the order of the work on every stage, and what a step that leaves the order computes.

The order is that of the schedule if micro-batches overlap, and F0 B0 F1 B1 ... if they don't, however busy the machine
is. What makes them run one by one is told by what would go wrong: test_kept_state.py, test_early_gradients.py.
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
from evener.strategies.pipeline.schedule import ScheduleName, Task, stage_order

SCHEDULES: list[ScheduleName] = ["1f1b", "gpipe"]


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
        return self.stages(batch).mean()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.gradients.append([float(stage.scale.grad) for stage in self.stages])  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fitted(module: Told, num_microbatches: int, schedule: ScheduleName = "1f1b") -> Told:
    """Three steps."""
    strategy = ModelParallelStrategy(num_microbatches=num_microbatches, schedule=schedule, optimizer_copies=0)
    data: Any = [torch.arange(float(num_microbatches))] * 3
    quiet_trainer(strategy, len(module.stages), max_epochs=1).fit(module, DataLoader(data, batch_size=None))
    return module


def on_stage(stage: int, order: list[Task]) -> list[Task]:
    return [task for task in order if task.stage == stage]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_stages", "num"), [(2, 4), (3, 3), (4, 5), (2, 8), (3, 2)])
def test_every_stage_serves_in_the_order_of_the_schedule(num_stages: int, num: int, schedule: ScheduleName) -> None:
    for order in fitted(Told(num_stages), num, schedule).orders[1:]:
        for stage in range(num_stages):
            assert on_stage(stage, order) == stage_order(schedule, num, num_stages, stage)


def test_the_first_step_runs_in_order() -> None:
    first, *_ = fitted(Told(2), 4).orders
    in_order = [Task(phase, i, 0) for i in range(4) for phase in ("F", "B")]
    assert on_stage(0, first)[-8:] == in_order  # before, a few samples are looked at


class Drawing(Told):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return nn.functional.dropout(self.stages(batch), 0.5).mean()


def test_random_numbers_alone_are_no_reason_to_run_in_order() -> None:
    for order in fitted(Drawing(2), 4).orders[1:]:
        assert on_stage(0, order) == stage_order("1f1b", 4, 2, 0)


class Fails(Told):
    """Fails in the second step, backward."""

    def tell(self, stage: int, microbatch: int, phase: Any) -> None:
        super().tell(stage, microbatch, phase)
        if len(self.orders) == 2 and (stage, microbatch, phase) == (0, 1, "B"):
            raise ValueError("broken")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_failed_backward_is_named(schedule: ScheduleName) -> None:
    with pytest.raises(ValueError, match=r"broken \[backward of micro-batch 2 of 3, 1 of 3 samples, on cpu"):
        fitted(Fails(2), 3, schedule)


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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_that_a_step_computes_itself_take_no_turns(schedule: ScheduleName) -> None:
    # d/ds of the mean of x·s·s' + (s·s')² is that of x + 2 over x = 0, 1, 2, 3
    assert fitted(Penalized(2), 4, schedule).gradients == [[3.5, 3.5]] * 3
