"""Enforce a schedule on micro-batches in threads: a stage serves one at a time, in the schedule's order.

`threads`: a CPU works in the calling thread, so threads are on different stages at the same time.
`launch`: an accelerator's work is only queued, so one thread at a time runs, on whatever stage, and queues it in the
order in which devices are to work. Between two stages it gives way to the next.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .schedule import Phase, Task


class Turns:
    """Grants micro-batches access to stages in one step.

    A task waits for those that are before it in its order. A micro-batch that comes to a stage again in forward (a tied
    head on the first stage, for example) only waits for the stage to be free. Micro-batches that have finished, or that
    wait themselves, block no others, so no order of visits can deadlock.

    Args:
        orders: the tasks of each stage, in order; or those of all stages in one order, of which one runs at a time.
    """

    def __init__(self, orders: Sequence[Sequence[Task]]) -> None:
        self._due = [deque(order) for order in orders]
        self._tasks: dict[int, list[Task]] = {}
        for task in chain(*orders):
            self._tasks.setdefault(task.microbatch, []).append(task)
        self._open = set(chain(*orders))
        self._holder: list[int | None] = [None] * len(orders)
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Task, threading.Lock]] = {}
        self.one_at_a_time = len(orders) == 1
        """Whether there is one order for all stages."""

    def enter(self, task: Task, done: Collection[Task] = ()) -> None:
        """Note tasks that are done, wait for the stage and take it. While waiting the micro-batch holds no stage."""
        with self._lock:
            self._open.difference_update(done)
            index = self._index(task)
            if self._holder[index] == task.microbatch and self._is_due(index, task):
                self._wake()
                return
            # a backward pass that branches reaches a stage before it has left another
            self._release(task.microbatch)
            self._wake()
            if self._may_enter(task):
                self._holder[self._index(task)] = task.microbatch
                return
            granted = threading.Lock()
            granted.acquire()
            self._waiting[task.microbatch] = (task, granted)
        granted.acquire()

    def leave(self, task: Task, done: bool = True) -> None:
        """Release the stage, if this micro-batch holds it; if the task is done, the next one may begin."""
        with self._lock:
            index = self._index(task)
            if self._holder[index] == task.microbatch:
                self._holder[index] = None
            if done:
                self._open.discard(task)
            self._wake()

    def finish(self, microbatch: int, phases: str = "FB") -> None:
        """Release all stages, and make no other micro-batch wait for this one in these directions."""
        with self._lock:
            self._release(microbatch)
            self._open.difference_update(task for task in self._tasks.get(microbatch, ()) if task.phase in phases)
            self._wake()

    def _index(self, task: Task) -> int:
        return 0 if self.one_at_a_time else task.stage

    def _release(self, microbatch: int) -> None:
        self._holder = [None if holder == microbatch else holder for holder in self._holder]

    def _is_due(self, index: int, task: Task) -> bool:
        """Whether no open task comes before this one, or it is done already."""
        due = self._due[index]
        while due and due[0] not in self._open:
            due.popleft()
        return task not in self._open or due[0] == task

    def _may_enter(self, task: Task) -> bool:
        index = self._index(task)
        return self._holder[index] is None and self._is_due(index, task)

    def _wake(self) -> None:
        """Give stages to those who wait for them and may enter."""
        for microbatch, (task, granted) in list(self._waiting.items()):
            if self._may_enter(task):
                self._holder[self._index(task)] = task.microbatch
                del self._waiting[microbatch]
                granted.release()


@dataclass
class Ticket:
    """Tracks one micro-batch through the stages, forward and then backward.

    Args:
        waits_in_backward: by stage, whether backward takes turns there. Not on an accelerator: its work is queued
            already, and one autograd thread serves all its micro-batches, so none may block it.
        crossed: called when backward has left a stage and entered another.
    """

    microbatch: int
    turns: Turns
    waits_in_backward: Sequence[bool]
    crossed: Callable[[], None] = lambda: None
    stage: int = field(default=0, init=False)
    _visited: set[int] = field(default_factory=lambda: {0}, init=False)
    _goes_back: bool = field(default=False, init=False)

    @contextmanager
    def held(self, phase: Phase) -> Generator[None]:
        """Run a micro-batch forward in the block, from stage 0 on, or backward, from where forward ended."""
        try:
            if phase == "F":
                self.turns.enter(self._task("F", 0))
            else:
                self._goes_back = True  # through the same crossings
                if self.turns.one_at_a_time:
                    self.turns.enter(self._task("B", len(self.waits_in_backward) - 1))
                elif self.waits_in_backward[self.stage]:
                    self.turns.enter(self._task("B", self.stage))
            yield
        except BaseException:
            self.turns.finish(self.microbatch)
            raise
        self.turns.finish(self.microbatch, phase)

    def move_on(self, stage: int, tensors: list[Tensor], move: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """Move to another stage with the tensors that it needs; their backward pass comes back to the current one."""
        if self._goes_back:  # activation checkpointing recomputes modules within the stage's turn in backward
            return move(tensors)
        is_first = stage not in self._visited
        left, self.stage = self.stage, stage
        if self.turns.one_at_a_time:
            if is_first:
                self._change_stage(left, stage)
            return move(tensors)
        self._change_stage(left, stage)
        return on_backward(move(tensors), partial(self._cross_back, stage, left, is_first))

    def _cross_back(self, left: int, stage: int, done: bool) -> None:
        if not self._goes_back:  # `torch.autograd.grad` within the step, which goes on forward
            return
        task = self._task("B", left)
        if self.waits_in_backward[stage]:
            self.turns.enter(self._task("B", stage), [task] if done else [])
        else:
            self.turns.leave(task, done)
        self.crossed()

    def _change_stage(self, left: int, stage: int) -> None:
        skipped = set(range(stage)) - self._visited
        self._visited.add(stage)
        self.turns.enter(self._task("F", stage), [self._task("F", other) for other in (left, *skipped)])

    def _task(self, phase: Phase, stage: int) -> Task:
        return Task(phase, self.microbatch, stage)


def on_backward(tensors: list[Tensor], call: Callable[[], None]) -> list[Tensor]:
    """Have a function called once in backward, when the gradients of all these tensors have arrived."""
    with_grad = [tensor.requires_grad for tensor in tensors]
    if not any(with_grad) or not torch.is_grad_enabled():
        return tensors
    marked = iter(_Mark.apply(call, *(t for t, grad in zip(tensors, with_grad, strict=True) if grad)))
    return [next(marked) if grad else tensor for tensor, grad in zip(tensors, with_grad, strict=True)]


class _Mark(torch.autograd.Function):
    """Identity that calls a function once in backward, when all gradients have arrived."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        # detached, not views, so that a module may modify its input in place
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return (None, *grads)
