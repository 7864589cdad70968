"""Turns of micro-batches on stages, for stages that are served by threads.

A CPU "device" does its work in the thread that asks for it. So each micro-batch gets a thread, and a stage serves one
thread at a time, in the order of the schedule: what `_schedule.py` draws is what happens.
"""

import threading
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ._schedule import schedule


class Turns:
    """Who may be on which stage, in one direction of one step.

    The first visit of a micro-batch to a stage waits for those that the schedule puts before it. A later visit (a
    tied head on the first stage, say) waits only for the stage to be free, and a micro-batch that has finished keeps
    nobody waiting, nor does one that waits itself, so that no order of visits can deadlock.

    Args:
        num_microbatches: micro-batches of the step.
        num_stages: stages.
        phase: `F` for forward, `B` for backward.
    """

    def __init__(self, num_microbatches: int, num_stages: int, phase: Literal["F", "B"]) -> None:
        tasks = [task for tick in schedule(num_microbatches, num_stages) for task in tick if task.phase == phase]
        self._due = [[task.microbatch for task in tasks if task.stage == stage] for stage in range(num_stages)]
        self._holder: list[int | None] = [None] * num_stages
        self._changed = threading.Condition()

    def enter(self, stage: int, microbatch: int) -> None:
        """Wait for the stage, and take it, if this micro-batch has not got it. Whoever waits has no stage meanwhile."""
        with self._changed:
            if self._holder[stage] == microbatch:
                return
            # a backward pass that branches comes to a stage before it has left another
            for other in range(len(self._holder)):
                self.leave(other, microbatch)
            self._changed.wait_for(lambda: self._may_enter(stage, microbatch))
            self._holder[stage] = microbatch

    def leave(self, stage: int, microbatch: int) -> None:
        """Free the stage, if this micro-batch has it."""
        with self._changed:
            if self._holder[stage] == microbatch:
                self._holder[stage] = None
                if microbatch in self._due[stage]:
                    self._due[stage].remove(microbatch)
                self._changed.notify_all()

    def finish(self, microbatch: int) -> None:
        """Let nobody wait for this micro-batch any more."""
        for stage in range(len(self._holder)):
            self.leave(stage, microbatch)
        with self._changed:
            self._due = [[other for other in due if other != microbatch] for due in self._due]
            self._changed.notify_all()

    def _may_enter(self, stage: int, microbatch: int) -> bool:
        due = self._due[stage]
        return self._holder[stage] is None and (microbatch not in due or due[0] == microbatch)


class Ticket:
    """One micro-batch's way through the stages: where it is, forward and then backward.

    Args:
        microbatch: its number in the step.
        turns: the turns of the forward pass.
        waits_in_backward: by stage, whether backward takes turns there. An accelerator's stage does not: its work is a
            queue already, and one thread of autograd serves all its micro-batches, which must never wait in it.
    """

    def __init__(self, microbatch: int, turns: Turns, waits_in_backward: list[bool]) -> None:
        self.microbatch = microbatch
        self.stage = 0
        self._turns = turns
        self._waits = waits_in_backward
        self._goes_back = False

    def run(self, call: Callable[[], Any]) -> Any:
        """Run the forward pass, which begins on stage 0 and enters others by `move_on`."""
        try:
            self._turns.enter(0, self.microbatch)
            return call()
        finally:
            self._turns.finish(self.microbatch)

    def run_backward(self, call: Callable[[], Any], turns: Turns) -> None:
        """Run the backward pass, which begins where the forward pass ended; crossings lead it back."""
        self._turns = turns
        self._goes_back = True
        try:
            if self._waits[self.stage]:
                turns.enter(self.stage, self.microbatch)
            call()
        finally:
            turns.finish(self.microbatch)

    def move_on(self, stage: int, tensors: list[Tensor], move: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Go to another stage with the tensors that the next module needs.

        Args:
            stage: the stage to enter, another than the present one.
            tensors: what comes along.
            move: brings a tensor to the stage's device.

        Returns:
            The tensors there. Their backward pass leaves that stage and enters the present one again.
        """
        if self._goes_back:  # activation checkpointing calls modules again: part of the stage's turn in backward
            return [move(tensor) for tensor in tensors]
        left, self.stage = self.stage, stage
        tensors = self._on_backward(tensors, self._turns_back(left, "enter"))
        self._turns.leave(left, self.microbatch)
        self._turns.enter(stage, self.microbatch)
        return self._on_backward([move(tensor) for tensor in tensors], self._turns_back(stage, "leave"))

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
    """The identity, whose backward calls a function once, when all gradients have arrived."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        # detached, not views: a module that works in place on its input stays legal
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return (None, *grads)
