"""Turns on stages: the order of the schedule, one at a time, and no deadlock."""

import threading
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from evener.strategies.pipeline._gradients import EarlyGradients
from evener.strategies.pipeline._microbatches import MicroBatches
from evener.strategies.pipeline.options import StageOptions
from evener.strategies.pipeline.schedule import ScheduleName, Task, stage_order
from evener.strategies.pipeline.stages import Stages

CPU = torch.device("cpu")
WAIT_S = 120.0
SCHEDULES: list[ScheduleName] = ["1f1b", "gpipe"]


class Tell(torch.autograd.Function):
    """The identity, which tells forward and backward to a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tell: Any) -> Tensor:
        ctx.tell = tell
        tell("F")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.tell("B")
        return grads[0], None


class Stage(nn.Module):
    """Tells who is on it; a sample's first number is the number of its micro-batch."""

    def __init__(self, stage: int, tell: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.stage, self.tell = stage, tell

    def forward(self, x: Tensor) -> Tensor:
        return Tell.apply(x * self.scale, partial(self.tell, self.stage, round(x[0].item())))


class Told(pl.LightningModule):
    def __init__(self, num_stages: int, tell: Any) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(Stage(stage, tell) for stage in range(num_stages)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.stages(batch).sum()


def step(
    num_stages: int,
    num_microbatches: int,
    tell: Any,
    name: ScheduleName = "1f1b",
    kind: type[Told] = Told,
) -> Told:
    """The second training step of a run; the loss of the batch is the mean of those of micro-batches."""
    told: list[Any] = [lambda *_: None]
    module = kind(num_stages, lambda *args: told[-1](*args))
    options = StageOptions(num_microbatches=num_microbatches, schedule=name)
    layout = Stages([CPU] * num_stages, options)
    layout.place(module)
    runner = MicroBatches(layout, module)
    names = [str(i) for i in range(num_microbatches)]
    chunks = [torch.full((1,), float(i)) for i in range(num_microbatches)]
    calls = [partial(module.training_step, chunk, 0) for chunk in chunks]
    for _ in range(2):
        module.zero_grad()
        gradients = EarlyGradients(list(module.parameters()), [1] * num_microbatches, "model_parallel", None)
        losses = runner.run(names, calls, gradients)
        gradients.attach(torch.stack(losses).mean()).backward()
        told.append(tell)
    runner.close()
    return module


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (3, 3), (4, 5), (2, 8), (3, 1), (3, 2)])
def test_every_stage_serves_in_the_order_of_the_schedule(
    num_stages: int, num_microbatches: int, name: ScheduleName
) -> None:
    seen: list[list[Task]] = [[] for _ in range(num_stages)]
    step(num_stages, num_microbatches, lambda s, i, phase: seen[s].append(Task(phase, i, s)), name)
    assert seen == [stage_order(name, num_microbatches, num_stages, stage) for stage in range(num_stages)]


def test_only_one_micro_batch_at_a_time_is_launched() -> None:
    busy = threading.Lock()

    def tell(stage: int, microbatch: int, phase: str) -> None:
        assert busy.acquire(blocking=False)
        threading.Event().wait(0.002)
        busy.release()

    step(3, 6, tell)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_failed_micro_batch_is_named_and_keeps_nobody_waiting(name: ScheduleName) -> None:
    def tell(stage: int, microbatch: int, phase: str) -> None:
        if (stage, microbatch, phase) == (1, 2, "F"):
            raise ValueError("broken")

    with pytest.raises(ValueError, match=r"broken \[2 on cpu\]"):
        step(2, 4, tell, name)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_failed_backward_is_named(name: ScheduleName) -> None:
    def tell(stage: int, microbatch: int, phase: str) -> None:
        if (stage, microbatch, phase) == (0, 1, "B"):
            raise ValueError("broken")

    with pytest.raises(ValueError, match=r"broken \[backward of 1 on cpu\]"):
        step(2, 3, tell, name)


class Skipping(Told):
    """Passes over stage 1, and comes back to it, and to stage 0."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for stage in (2, 1, 0, 2):
            x = self.stages[stage](x)
        return x.sum()


def test_a_micro_batch_may_pass_over_a_stage_and_come_back_to_it() -> None:
    module = step(3, 5, lambda *_: None, kind=Skipping)
    # the mean of x·s₀·s₁·s₂² over x = 0, ..., 4
    assert [float(stage.scale.grad) for stage in module.stages] == [2.0, 2.0, 4.0]


class Penalized(Told):
    """A step that differentiates by its input goes backward through the stages before it has been forward."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.clone().requires_grad_()
        output = self.stages(x).sum()
        (slope,) = torch.autograd.grad(output, x, create_graph=True)
        return self.stages(x).sum() + slope.square().sum()


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_that_a_step_computes_itself_take_no_turns(name: ScheduleName) -> None:
    module = step(2, 4, lambda *_: None, name, kind=Penalized)
    # d/ds of the mean of x·s·s' + (s·s')² is that of x + 2 over x = 0, 1, 2, 3
    assert [float(stage.scale.grad) for stage in module.stages] == [3.5, 3.5]
