"""Enforce the schedule of micro-batches on stages that threads serve.

A CPU "device" works in the calling thread. So each micro-batch gets a thread, and a stage serves one thread at a time,
in the order that `_schedule.py` draws.
"""

import threading
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ._schedule import schedule


class Turns:
    """Grants micro-batches access to stages, in one direction of one step.

    The first visit of a micro-batch to a stage waits for those that the schedule puts before it. A later visit (a tied
    head on the first stage, for example) only waits for the stage to be free. Micro-batches that have finished, or that
    wait themselves, block no others, so no order of visits can deadlock.
    """

    def __init__(self, num_microbatches: int, num_stages: int, phase: Literal["F", "B"]) -> None:
        tasks = [task for tick in schedule(num_microbatches, num_stages) for task in tick if task.phase == phase]
        self._due = [[task.microbatch for task in tasks if task.stage == stage] for stage in range(num_stages)]
        self._holder: list[int | None] = [None] * num_stages
        self._changed = threading.Condition()

    def enter(self, stage: int, microbatch: int) -> None:
        """Wait for the stage and take it, unless this micro-batch has it already. While waiting it holds no stage."""
        with self._changed:
            if self._holder[stage] == microbatch:
                return
            # a backward pass that branches reaches a stage before it has left another
            for other in range(len(self._holder)):
                self.leave(other, microbatch)
            self._changed.wait_for(lambda: self._may_enter(stage, microbatch))
            self._holder[stage] = microbatch

    def leave(self, stage: int, microbatch: int) -> None:
        """Release the stage, if this micro-batch holds it."""
        with self._changed:
            if self._holder[stage] == microbatch:
                self._holder[stage] = None
                if microbatch in self._due[stage]:
                    self._due[stage].remove(microbatch)
                self._changed.notify_all()

    def finish(self, microbatch: int) -> None:
        """Make no other micro-batch wait for this one."""
        for stage in range(len(self._holder)):
            self.leave(stage, microbatch)
        with self._changed:
            self._due = [[other for other in due if other != microbatch] for due in self._due]
            self._changed.notify_all()

    def _may_enter(self, stage: int, microbatch: int) -> bool:
        due = self._due[stage]
        return self._holder[stage] is None and (microbatch not in due or due[0] == microbatch)


class Ticket:
    """Tracks one micro-batch through the stages, forward and then backward.

    Args:
        waits_in_backward: by stage, whether backward takes turns there. Not on an accelerator: its work is queued
            already, and one autograd thread serves all its micro-batches, so none may block it.
    """

    def __init__(self, microbatch: int, turns: Turns, waits_in_backward: list[bool]) -> None:
        self.microbatch = microbatch
        self.stage = 0
        self._turns = turns
        self._waits = waits_in_backward
        self._goes_back = False

    def run(self, call: Callable[[], Any]) -> Any:
        """Run the forward pass, which starts on stage 0 and enters other stages by `move_on`."""
        try:
            self._turns.enter(0, self.microbatch)
            return call()
        finally:
            self._turns.finish(self.microbatch)

    def run_backward(self, call: Callable[[], Any], turns: Turns) -> None:
        """Run the backward pass, which starts where forward ended and goes back through the same crossings."""
        self._turns = turns
        self._goes_back = True
        try:
            if self._waits[self.stage]:
                turns.enter(self.stage, self.microbatch)
            call()
        finally:
            turns.finish(self.microbatch)

    def move_on(self, stage: int, tensors: list[Tensor], move: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """Move to another stage, with the tensors that the next module needs.

        Args:
            stage: the stage to enter; not the current one.

        Returns:
            The moved tensors. Their backward pass leaves that stage and re-enters the current one.
        """
        if self._goes_back:  # activation checkpointing recomputes modules within the stage's turn in backward
            return move(tensors)
        left, self.stage = self.stage, stage
        tensors = self._on_backward(tensors, self._turns_back(left, "enter"))
        self._turns.leave(left, self.microbatch)
        self._turns.enter(stage, self.microbatch)
        return self._on_backward(move(tensors), self._turns_back(stage, "leave"))

    def _turns_back(self, stage: int, action: Literal["enter", "leave"]) -> Callable[[], None] | None:
        if not self._waits[stage]:
            return None
        return lambda: getattr(self._turns, action)(stage, self.microbatch)

    def _on_backward(self, tensors: list[Tensor], call: Callable[[], None] | None) -> list[Tensor]:
        with_grad = [tensor.requires_grad for tensor in tensors]
        if call is None or not any(with_grad) or not torch.is_grad_enabled():
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
