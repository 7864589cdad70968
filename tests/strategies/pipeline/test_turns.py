"""Turns on stages: the order of the schedule, overlap, and no deadlock."""

import threading
from functools import partial
from itertools import product
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from evener.strategies.pipeline._gradients import EarlyGradients
from evener.strategies.pipeline._microbatches import MicroBatches
from evener.strategies.pipeline._turns import Ticket, Turns
from evener.strategies.pipeline.options import Overlap, StageOptions
from evener.strategies.pipeline.schedule import ScheduleName, Task, stage_order
from evener.strategies.pipeline.stages import Stages

CPU = torch.device("cpu")
WAIT_S = 120.0
WAYS: list[tuple[ScheduleName, Overlap]] = list(product(("1f1b", "gpipe"), ("threads", "launch")))


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
    overlap: Overlap = "threads",
    kind: type[Told] = Told,
) -> Told:
    """One training step; the loss of the batch is the sum of the losses of micro-batches."""
    module = kind(num_stages, tell)
    options = StageOptions(num_microbatches=num_microbatches, schedule=name, overlap=overlap, deterministic=False)
    layout = Stages([CPU] * num_stages, options)
    layout.place(module)
    runner = MicroBatches(layout)
    calls = [partial(module.training_step, torch.full((1,), float(i)), 0) for i in range(num_microbatches)]
    gradients = EarlyGradients(list(module.parameters()), [1] * num_microbatches, "sum", "model_parallel", None)
    losses = runner.run([str(i) for i in range(num_microbatches)], calls, gradients)
    gradients.attach(torch.stack(losses).sum()).backward()
    runner.shutdown()
    return module


@pytest.mark.parametrize(("name", "overlap"), WAYS)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (3, 3), (4, 5), (2, 8), (3, 1), (3, 2)])
def test_every_stage_serves_in_the_order_of_the_schedule(
    num_stages: int, num_microbatches: int, name: ScheduleName, overlap: Overlap
) -> None:
    seen: list[list[Task]] = [[] for _ in range(num_stages)]
    step(num_stages, num_microbatches, lambda s, i, phase: seen[s].append(Task(phase, i, s)), name, overlap)
    assert seen == [stage_order(name, num_microbatches, num_stages, stage) for stage in range(num_stages)]


def test_two_stages_work_at_the_same_time_forward_and_backward() -> None:
    # stage 0 and stage 1 wait for each other: only two threads at work can get past
    meetings = [threading.Barrier(2) for _ in range(2)]
    together = {  # columns 3 and 4 of the table in `schedule`
        ("B", 0, 0): meetings[0],
        ("F", 1, 1): meetings[0],
        ("F", 0, 2): meetings[1],
        ("B", 1, 1): meetings[1],
    }

    def tell(stage: int, microbatch: int, phase: str) -> None:
        if (phase, stage, microbatch) in together:
            together[phase, stage, microbatch].wait(WAIT_S)

    module = step(2, 4, tell)
    assert not any(barrier.broken for barrier in meetings)
    # d/ds of Σ x·s·s' is Σ x: 0 + 1 + 2 + 3
    assert [float(stage.scale.grad) for stage in module.stages] == [6.0, 6.0]


@pytest.mark.parametrize(("name", "overlap"), WAYS)
def test_a_stage_is_never_shared(name: ScheduleName, overlap: Overlap) -> None:
    busy = [threading.Lock(), threading.Lock(), threading.Lock()]

    def tell(stage: int, microbatch: int, phase: str) -> None:
        assert busy[stage].acquire(blocking=False)
        threading.Event().wait(0.002)  # time for another to come, if it may
        busy[stage].release()

    step(3, 6, tell, name, overlap)


def test_only_one_micro_batch_at_a_time_is_launched() -> None:
    busy = threading.Lock()

    def tell(stage: int, microbatch: int, phase: str) -> None:
        assert busy.acquire(blocking=False)
        threading.Event().wait(0.002)
        busy.release()

    step(3, 6, tell, overlap="launch")


@pytest.mark.parametrize(("name", "overlap"), WAYS)
def test_a_failed_micro_batch_is_named_and_keeps_nobody_waiting(name: ScheduleName, overlap: Overlap) -> None:
    def tell(stage: int, microbatch: int, phase: str) -> None:
        if (stage, microbatch, phase) == (1, 2, "F"):
            raise ValueError("broken")

    with pytest.raises(ValueError, match=r"broken \[2 on cpu\]"):
        step(2, 4, tell, name, overlap)


@pytest.mark.parametrize(("name", "overlap"), WAYS)
def test_a_failed_backward_is_named(name: ScheduleName, overlap: Overlap) -> None:
    def tell(stage: int, microbatch: int, phase: str) -> None:
        if (stage, microbatch, phase) == (0, 1, "B"):
            raise ValueError("broken")

    with pytest.raises(ValueError, match=r"broken \[backward on cpu\] \[1 on cpu\]"):
        step(2, 3, tell, name, overlap)


def orders(num_microbatches: int, num_stages: int) -> list[list[Task]]:
    return [stage_order("1f1b", num_microbatches, num_stages, stage) for stage in range(num_stages)]


def test_first_visits_wait_for_those_before_them_and_later_visits_do_not() -> None:
    turns = Turns(orders(3, 2))  # stage 0: F0 F1 B0 F2 B1 B2
    first, second, third = (Task("F", i, 0) for i in range(3))
    assert turns._may_enter(first)
    assert not turns._may_enter(second)
    turns.enter(first)
    turns.leave(first)
    assert turns._may_enter(second)
    assert turns._may_enter(first)  # again, before anyone else came
    assert not turns._may_enter(Task("B", 0, 0))
    turns.finish(1)
    assert turns._may_enter(Task("B", 0, 0))  # micro-batch 1 will not come any more
    assert not turns._may_enter(third)
    turns.enter(Task("B", 0, 0))
    turns.leave(Task("B", 0, 0), done=False)  # it will come again
    assert not turns._may_enter(third)
    turns.finish(0)
    assert turns._may_enter(third)


@pytest.mark.timeout(600, method="thread")
def test_a_stage_that_is_done_goes_to_who_waits_for_it() -> None:
    turns = Turns([stage_order("gpipe", 2, 2, stage) for stage in range(2)])
    for microbatch in range(2):
        turns.finish(microbatch, "F")
    turns.enter(Task("B", 1, 0))  # a branch of it has skipped stage 1, where it comes first
    other = threading.Thread(target=turns.enter, args=[Task("B", 0, 1)])
    other.start()
    while 0 not in turns._waiting:
        threading.Event().wait(0.001)
    turns.enter(Task("B", 1, 0), done=[Task("B", 1, 1)])
    other.join(WAIT_S)
    assert turns._holder == [1, 0]


@pytest.mark.timeout(600, method="thread")
def test_whoever_waits_has_no_stage() -> None:
    turns = Turns([stage_order("gpipe", 2, 2, stage) for stage in range(2)])
    for microbatch in range(2):
        turns.finish(microbatch, "F")
    turns.enter(Task("B", 1, 1))  # the last micro-batch comes back first
    turns.enter(Task("B", 1, 1))  # it has the stage already
    turns.enter(Task("B", 1, 0))  # and leaves it
    assert turns._holder == [1, None]
    turns.finish(1)
    turns.enter(Task("B", 0, 1))
    assert turns._holder == [None, 0]


@pytest.mark.timeout(600, method="thread")
@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_a_micro_batch_may_pass_over_a_stage_and_come_back_to_it(one_at_a_time: bool) -> None:
    every = orders(1, 3)
    turns = Turns([[*(t for o in every for t in o if t.phase == "F"), Task("B", 0, 2)]] if one_at_a_time else every)
    ticket = Ticket(0, turns, [True] * 3)
    with ticket.held("F"):
        for stage in (2, 1, 0, 2):
            ticket.move_on(stage, [], lambda tensors: tensors)
    with ticket.held("B"):
        pass
    assert turns._open == set()


def test_backward_on_an_accelerator_never_waits_but_lets_forward_go_on() -> None:
    turns = Turns(orders(3, 2))  # stage 0: F0 F1 B0 F2 B1 B2
    turns.finish(1)
    ticket = Ticket(0, turns, [False, False])
    with ticket.held("F"):
        pass
    with ticket.held("B"):
        assert turns._holder == [None, None]
        assert not turns._may_enter(Task("F", 2, 0))
    assert turns._may_enter(Task("F", 2, 0))


class Penalized(Told):
    """A step that differentiates by its input goes backward through the stages before it has been forward."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.clone().requires_grad_()
        output = self.stages(x).sum()
        (slope,) = torch.autograd.grad(output, x, create_graph=True)
        return self.stages(x).sum() + slope.square().sum()


@pytest.mark.parametrize(("name", "overlap"), WAYS)
def test_gradients_that_a_step_computes_itself_take_no_turns(name: ScheduleName, overlap: Overlap) -> None:
    module = step(2, 4, lambda *_: None, name, overlap, kind=Penalized)
    # d/ds of Σ (x·s·s' + (s·s')²) is Σ (x + 2) over x = 0, 1, 2, 3
    assert [float(stage.scale.grad) for stage in module.stages] == [14.0, 14.0]
