"""Turns on stages: the order of the schedule, overlap, and no deadlock."""

import threading
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from evener.strategies.pipeline._microbatches import MicroBatches
from evener.strategies.pipeline._schedule import schedule
from evener.strategies.pipeline._turns import Turns
from evener.strategies.pipeline.options import StageOptions
from evener.strategies.pipeline.stages import Stages

CPU = torch.device("cpu")
WAIT_S = 120.0


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


def step(num_stages: int, num_microbatches: int, tell: Any) -> Told:
    """One training step in threads."""
    module = Told(num_stages, tell)
    options = StageOptions(num_microbatches=num_microbatches, deterministic=False)
    layout = Stages([CPU] * num_stages, options)
    layout.place(module)
    runner = MicroBatches(layout)
    calls = [partial(module.training_step, torch.full((1,), float(i)), 0) for i in range(num_microbatches)]
    losses = runner.forward([str(i) for i in range(num_microbatches)], calls)
    torch.stack(losses).sum().backward()
    runner.finish_backward()
    runner.shutdown()
    return module


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (3, 3), (4, 5), (2, 8), (3, 1)])
def test_every_stage_serves_in_the_order_of_the_schedule(num_stages: int, num_microbatches: int) -> None:
    seen: list[list[str]] = [[] for _ in range(num_stages)]
    step(num_stages, num_microbatches, lambda stage, microbatch, phase: seen[stage].append(f"{phase}{microbatch}"))
    expected: list[list[str]] = [[] for _ in range(num_stages)]
    for tick in schedule(num_microbatches, num_stages):
        for task in tick:
            expected[task.stage].append(f"{task.phase}{task.microbatch}")
    assert seen == expected


def test_two_stages_work_at_the_same_time_forward_and_backward() -> None:
    # in each direction, stage 0 and stage 1 wait for each other once: only two threads at work can get past
    meeting = {"F": threading.Barrier(2), "B": threading.Barrier(2)}
    together = {("F", 0, 1), ("F", 1, 0), ("B", 0, 1), ("B", 1, 0)}  # columns 1 and 4 of the schedule's table

    def tell(stage: int, microbatch: int, phase: str) -> None:
        if (phase, stage, microbatch) in together:
            meeting[phase].wait(WAIT_S)

    module = step(2, 2, tell)
    assert not any(barrier.broken for barrier in meeting.values())
    # d/ds of Σ x·s·s' is Σ x: 0 + 1
    assert [float(stage.scale.grad) for stage in module.stages] == [1.0, 1.0]


def test_a_stage_is_never_shared() -> None:
    busy = [threading.Lock(), threading.Lock(), threading.Lock()]

    def tell(stage: int, microbatch: int, phase: str) -> None:
        assert busy[stage].acquire(blocking=False)
        threading.Event().wait(0.002)  # time for another to come, if it may
        busy[stage].release()

    step(3, 6, tell)


def test_a_failed_micro_batch_is_named_and_keeps_nobody_waiting() -> None:
    def tell(stage: int, microbatch: int, phase: str) -> None:
        if (stage, microbatch, phase) == (1, 2, "F"):
            raise ValueError("broken")

    with pytest.raises(ValueError, match=r"broken \[2 on cpu\]"):
        step(2, 4, tell)


def test_a_failed_backward_is_named() -> None:
    def tell(stage: int, microbatch: int, phase: str) -> None:
        if (stage, microbatch, phase) == (0, 1, "B"):
            raise ValueError("broken")

    with pytest.raises(ValueError, match=r"broken \[backward of 1 on cpu\]"):
        step(2, 3, tell)


def test_first_visits_wait_for_those_before_them_and_later_visits_do_not() -> None:
    turns = Turns(3, 2, "F")
    assert turns._may_enter(0, 0)
    assert not turns._may_enter(0, 1)
    turns.enter(0, 0)
    turns.leave(0, 0)
    assert turns._may_enter(0, 1)
    assert turns._may_enter(0, 0)  # again, before anyone else came
    turns.finish(1)
    assert turns._may_enter(0, 2)  # micro-batch 1 will not come any more
    backward = Turns(3, 2, "B")
    assert [backward._may_enter(1, microbatch) for microbatch in range(3)] == [False, False, True]


@pytest.mark.timeout(600, method="thread")
def test_whoever_waits_has_no_stage() -> None:
    turns = Turns(2, 2, "B")
    turns.enter(1, 1)  # the last micro-batch comes back first
    turns.enter(1, 1)  # it has the stage already
    turns.enter(0, 1)  # and leaves it
    turns.enter(1, 0)
    assert turns._holder == [1, 0]
