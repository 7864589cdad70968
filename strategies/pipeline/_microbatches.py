"""Run a training step in micro-batches, forward and backward: a loop over the tasks of a schedule, on one thread."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.profiler import record_function
from typing_extensions import override

from ..batch.exact.values import Values
from ..batch.log_recorder import LogRecorder
from ..batch.losses import ChunkLosses
from ..batch.part_metrics import PartMetrics, finds_others
from ..core.devices import is_accelerator
from ..core.errors import ConfigError
from ..core.executor import Executor, Piece, ThreadState, reraised
from ._gradients import EarlyGradients
from ._module_state import ModuleState
from ._time_balance import PartTimes
from ._turns import Interruptible, Whole
from .schedule import ScheduleName, launch_order
from .stages import Stages

RunAs: TypeAlias = Callable[[int, Callable[[], Any]], Any]
"""Calls a function for a micro-batch, given by its number."""


class MicroBatches:
    """Runs micro-batches on the stages of a layout, each forward and, as soon as the schedule says so, backward.

    Where micro-batches on different stages alternate (`1f1b`), steps are interrupted between stages. Those of the first
    step run one after the other, as do all of a module that keeps state between its layers (see `_module_state.py`) or
    is placed by hand.

    Args:
        module: the placed module, whose steps are watched; None trusts it to keep no state.
    """

    def __init__(self, layout: Stages, module: nn.Module | None = None) -> None:
        self._layout = layout
        self._state = None if module is None else ModuleState(module, layout.hook_numbers)
        self.times: PartTimes | None = None
        """Measures the parts of micro-batches, which then run one after the other."""
        self._pool: ThreadPoolExecutor | None = None

    @property
    def overlaps(self) -> bool:
        """Whether stages have different micro-batches at the same time."""
        layout = self._layout
        return layout.options.num_microbatches > 1 and layout.num_stages > 1 and layout.plan is not None

    def run(
        self,
        names: Sequence[str],
        calls: Sequence[Callable[[], Any]],
        gradients: EarlyGradients | None,
        run_as: RunAs = lambda _, call: call(),
        meet: Callable[[], None] | None = None,
        in_order: bool = False,
    ) -> list[Any]:
        """Run one training step per micro-batch, and go backward with all but the last one to do so.

        Args:
            calls: one per micro-batch; each returns a loss, a mapping with `loss`, or None.
            gradients: collects their gradients; None if their outputs are to keep their graphs.
            run_as: runs what a micro-batch does in a thread, forward and backward, with its number.
            meet: called when all have been forward, before the first goes backward; None if they need not wait.
            in_order: run them one after the other.

        Returns:
            Their results, in order.

        Raises:
            Exception: the error of the first one that failed; its message names the micro-batch.
        """
        device, state = self._layout.devices[0], self._state
        calls = [partial(run_as, i, partial(self._forward, i, call)) for i, call in enumerate(calls)]
        if gradients is not None:
            calls = [partial(_taken, gradients, i, call) for i, call in enumerate(calls)]
        pieces = [Piece(device, *named) for named in zip(names, calls, strict=True)]
        with nullcontext() if state is None else state.step():
            if gradients is None:
                return Executor(threads=False).run(pieces)
            try:
                return self._in_turns(pieces, gradients, run_as, meet, in_order)
            finally:
                gradients.collect()

    def shutdown(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _in_turns(
        self,
        pieces: Sequence[Piece],
        gradients: EarlyGradients,
        run_as: RunAs,
        meet: Callable[[], None] | None,
        in_order: bool,
    ) -> list[Any]:
        """Run the tasks of a schedule, but for the last one, which the loss of the batch goes backward through.

        That one would add to gradients that are handed out already, if it runs other backward passes within itself.
        """
        name, num_stages = self._schedule(meet is not None, in_order)
        order, state = launch_order(name, len(pieces), num_stages), ThreadState()
        is_watched = self._state is not None and not self._state.is_known
        if num_stages == 1 and not is_watched and self.times is None and all(map(is_accelerator, self._layout.devices)):
            # these are at work on several micro-batches if all are launched before the first goes backward; gradients
            # are added in the same order as in the first step, which is watched
            order = sorted(order, key=lambda task: task.phase == "B")
        steps: list[Interruptible | Whole] = [Whole(piece, state) for piece in pieces]
        if num_stages > 1:
            self._pool = self._pool or ThreadPoolExecutor(num_stages, thread_name_prefix="stages")
            steps = [Interruptible(piece, self._layout.entering, self._pool, state) for piece in pieces]
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
                if task is not order[-1] or (self._state is not None and self._state.nests_backward):
                    backward = partial(run_as, number, partial(gradients.go_backward, number))
                    with record_function(f"B{number}"):
                        reraised(Piece(piece.device, f"backward of {piece.name}", backward), self._backward, backward)
        finally:
            for step in steps:
                step.abandon()
        return [step.output for step in steps]

    def _schedule(self, meets: bool, in_order: bool) -> tuple[ScheduleName, int]:
        """The order, and the stages that it tells apart: one where steps are not interrupted between them.

        Under `gpipe` they need not be: each device gets its work in the same order.
        """
        options, state = self._layout.options, self._state
        alternates = self.overlaps and self.times is None and not in_order and (state is None or state.may_alternate())
        if meets or (options.schedule == "gpipe" and self.times is None):
            return "gpipe", 1
        return "1f1b", self._layout.num_stages if alternates else 1

    def _forward(self, number: int, call: Callable[[], Any]) -> Any:
        if self.times is not None:
            self.times.begin_microbatch()
        state = self._state
        if state is None:
            return call()
        is_watched = not (number or state.is_known)
        with state.microbatch(number), self._layout.entering(state.look) if is_watched else nullcontext():
            output = call()
        if is_watched:
            self._verify_reads(state)
        return output

    def _backward(self, call: Callable[[], Any]) -> None:
        state = self._state
        with nullcontext() if state is None or state.nests_backward is not None else state.watching_backward():
            call()
        if self.times is not None:
            self.times.end_microbatch()

    def _verify_reads(self, state: ModuleState) -> None:
        """Refuse a step that reads gradients, if other micro-batches go backward meanwhile."""
        options = self._layout.options
        if state.reads_gradients and options.schedule == "1f1b":
            raise ConfigError(
                f"num_microbatches={options.num_microbatches}: training_step reads the .grad of a parameter, which "
                "holds gradients of other micro-batches under schedule=1f1b. Read it in on_before_optimizer_step, or "
                "set strategy.schedule=gpipe."
            )


def _taken(gradients: EarlyGradients, number: int, call: Callable[[], Any]) -> Any:
    return gradients.take(number, call())


class MicroBatchLogs(LogRecorder):
    """Logs each name once for the whole batch, though every micro-batch calls `self.log`."""

    def __init__(self, module: nn.Module, num_microbatches: int, device: torch.device) -> None:
        self._module, self._num = module, num_microbatches
        self._metrics = self._new_metrics()
        super().__init__(
            [list(module.modules())] * num_microbatches, device, lambda value: self._metrics.original(value)
        )

    def _new_metrics(self) -> PartMetrics:
        return PartMetrics(self._module, self._num, "model_parallel", lambda: self.part)

    @override
    @contextmanager
    def recording(self, values: Values, step: str, loader: int = 0) -> Generator[None]:
        if finds_others(self._module, self._metrics.found):
            self._metrics.close()
            self._metrics = self._new_metrics()
        with self._metrics.counting(), super().recording(values, step, loader):
            yield

    def unrecorded(self) -> AbstractContextManager[None]:
        """Call the metrics inside the block for no micro-batch."""
        return self._metrics.uncounted()

    @override
    def replay(self, sizes: Sequence[int], losses: ChunkLosses | None = None) -> None:
        self._metrics.merge(range(len(sizes)), sizes, [] if losses is None else losses.losses)
        super().replay(sizes, losses)

    def close(self) -> None:
        """Restore the methods of the module's metrics."""
        self._metrics.close()
