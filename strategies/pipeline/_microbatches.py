"""Run a training step in micro-batches, forward and backward: a loop over the tasks of a schedule, on one thread.

Where micro-batches alternate, a step gives way between stages. As it may be anybody's code, it is a coroutine by a
thread on which it waits. Who calls `run_through` waits until the step comes to a later stage, so that only one of them
runs at a time. The work of an accelerator is only queued meanwhile: its devices are at work on different micro-batches
all the same.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytorch_lightning as pl
from torch.profiler import record_function
from typing_extensions import override

from ..batch.evaluation_lists import EvaluationLists
from ..batch.log_recorder import LogRecorder
from ..batch.whole.meeting import InTurn, seated
from ..core.devices import is_accelerator
from ..core.executor import Piece, ThreadState, Turns, reraised
from ._gradients import EarlyGradients
from ._module_state import ModuleState
from .schedule import ScheduleName, launch_order
from .stages import Stages


class MicroBatches:
    """Runs micro-batches on the stages of a layout, each forward and, as soon as the schedule says so, backward.

    Where micro-batches on different stages alternate (`1f1b`), steps are interrupted between stages. Those of the first
    step run one after the other, as do all of a module that keeps state between its layers (see `_module_state.py`) or
    is placed by hand.

    Args:
        module: the placed module, whose steps are watched.
        strategy: name that begins messages.
        lists: joins what micro-batches append to lists of the module.
    """

    def __init__(self, layout: Stages, module: pl.LightningModule, strategy: str, lists: EvaluationLists) -> None:
        self._layout = layout
        self._state = ModuleState(module, layout)
        num = layout.options.num_microbatches
        modules, devices = [list(module.modules())] * num, [layout.meeting_device] * num
        self.logs = LogRecorder(module, modules, devices, strategy, lists)
        self._pool: ThreadPoolExecutor | None = None
        self._nests_backward = False

    def run(
        self,
        names: Sequence[str],
        calls: Sequence[Callable[[], Any]],
        gradients: EarlyGradients,
        meet: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Run one training step per micro-batch, and go backward with all but the last one to do so.

        Args:
            calls: one per micro-batch; each returns a loss, a mapping with `loss`, or None.
            gradients: collects their gradients.
            meet: called when all have been forward, before the first goes backward; None if they need not wait.

        Returns:
            Their results, in order.

        Raises:
            Exception: the error of the first one that failed; its message names the micro-batch.
        """
        pieces = [
            Piece(self._layout.devices[0], name, partial(self._forward, i, call, gradients))
            for i, (name, call) in enumerate(zip(names, calls, strict=True))
        ]
        try:
            return self._in_turns(pieces, gradients, meet)
        finally:
            gradients.collect()

    def close(self) -> None:
        """Stop the threads, and restore the methods of the module's metrics."""
        self.logs.close()
        if self._pool is not None:
            self._pool.shutdown()

    def _in_turns(
        self, pieces: Sequence[Piece], gradients: EarlyGradients, meet: Callable[[], None] | None
    ) -> list[Any]:
        """Run the tasks of a schedule, but for the last one, which the loss of the batch goes backward through.

        That one would add to gradients that are handed out already, if it runs other backward passes within itself.
        """
        name, num_stages = self._schedule(meet is not None)
        order, state = launch_order(name, len(pieces), num_stages), ThreadState()
        if num_stages == 1 and self._state.is_known and all(map(is_accelerator, self._layout.devices)):
            # these are at work on several micro-batches if all are launched before the first goes backward; gradients
            # are added in the same order as in the first step, which is watched
            order = sorted(order, key=lambda task: task.phase == "B")
        if num_stages > 1:
            self._pool = self._pool or ThreadPoolExecutor(num_stages, thread_name_prefix="stages")
        steps = [_Step(piece, state, self._layout, self._pool if num_stages > 1 else None) for piece in pieces]
        try:
            for task in order:
                number, piece = task.microbatch, pieces[task.microbatch]
                if task.phase == "F":
                    with record_function(f"F{number} stage {task.stage}" if num_stages > 1 else f"F{number}"):
                        reraised(piece, steps[number].run_through, task.stage)
                    continue
                if meet is not None:
                    meet()
                    meet = None
                if task is not order[-1] or self._nests_backward:
                    backward = partial(self.logs.run, number, partial(gradients.go_backward, number))
                    with record_function(f"B{number}"):
                        reraised(Piece(piece.device, f"backward of {piece.name}", backward), backward)
        finally:
            for step in steps:
                step.leave()
        return [step.result for step in steps]

    def _schedule(self, meets: bool) -> tuple[ScheduleName, int]:
        """The order, and the stages that it tells apart: one where steps are not interrupted between them.

        Under `gpipe` they need not be: each device gets its work in the same order.
        """
        if meets or self._layout.options.schedule == "gpipe":
            return "gpipe", 1
        return "1f1b", self._layout.num_stages if self._layout.overlaps and self._state.may_alternate() else 1

    def _forward(self, number: int, call: Callable[[], Any], gradients: EarlyGradients) -> Any:
        is_first = not (number or self._state.is_known)
        with seated(InTurn(number)):
            output = self.logs.run(number, partial(self._state.watch, call) if is_first else call)
        output = gradients.take(number, output)
        if is_first:
            self._nests_backward = gradients.nest(number)
        return output


class _Step(Turns):
    """The step of a micro-batch.

    Args:
        state: what torch knows of the thread that calls `run_through`.
        layout: tells where the step enters a stage for the first time.
        pool: has a free thread; None for a step that is not interrupted.
    """

    def __init__(self, piece: Piece, state: ThreadState, layout: Stages, pool: ThreadPoolExecutor | None) -> None:
        super().__init__(piece if pool is None else replace(piece, call=partial(self._call, piece, layout)), state)
        self._pool, self._stage = pool, 0

    def run_through(self, stage: int) -> None:
        """Go on until a stage after this one is to be entered, or to the end."""
        if self._pool is None:
            self.result = self._state.run(self._piece)
        elif self._stage <= stage:
            self.resume()
            if self.error is not None:
                raise self.error

    @override
    def _start(self, call: Callable[..., None], *args: Any) -> None:
        assert self._pool is not None
        self._pool.submit(call, *args)

    def _enter(self, stage: int) -> None:
        """Give way, in the step, before it enters a stage."""
        self._stage = stage
        self.give_way()

    def _call(self, piece: Piece, layout: Stages) -> Any:
        with layout.entering(self._enter):
            return piece.call()
