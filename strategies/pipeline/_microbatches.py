"""Run a training step in micro-batches, forward and backward, on overlapping stages."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..batch.log_recorder import LogRecorder
from ..batch.losses import ChunkLosses
from ..core.devices import is_accelerator, on_device
from ..core.errors import ConfigError
from ..core.executor import Executor, Piece, reraised
from ..core.module_log import Receiver
from ._gradients import EarlyGradients
from ._kept_state import KeptState
from ._part_times import PartTimes
from ._step_metrics import StepMetrics
from ._turns import Ticket, Turns
from .options import Overlap
from .schedule import Phase, launch_order, stage_order
from .stages import Stages

RunAs: TypeAlias = Callable[[int, Callable[[], Any]], Any]
"""Calls a function for a micro-batch, given by its number."""


_Around: TypeAlias = Callable[[Phase], AbstractContextManager[Any]]
"""The context of what a micro-batch does in a direction."""


class MicroBatches:
    """Runs micro-batches on the stages of a layout, each forward and, as soon as the schedule says so, backward.

    There are as many threads as stages; `_turns.py` says which of their micro-batches may run. One after the other run
    those of the first step, and all of a module that keeps state between its layers (see `_kept_state.py`) or is placed
    by hand.

    Args:
        module: the placed module, whose steps are watched; None trusts it to keep no state.
    """

    def __init__(self, layout: Stages, module: nn.Module | None = None) -> None:
        self._layout = layout
        self._kept_state = None if module is None else KeptState(module, layout.hook_numbers)
        self.times: PartTimes | None = None
        """Measures the parts of micro-batches, which then run one after the other."""
        self._in_order = Executor(threads=False)
        self._threads = Executor(threads=True, most=layout.num_stages)

    @property
    def overlap(self) -> Overlap | None:
        """How stages work on different micro-batches at the same time; None if they don't."""
        layout, options = self._layout, self._layout.options
        if options.num_microbatches == 1 or layout.num_stages == 1 or layout.plan is None:
            return None
        if options.is_deterministic:
            return "launch"
        return options.overlap or ("launch" if all(is_accelerator(device) for device in layout.devices) else "threads")

    def run(
        self,
        names: Sequence[str],
        calls: Sequence[Callable[[], Any]],
        gradients: EarlyGradients | None,
        run_as: RunAs = lambda _, call: call(),
    ) -> list[Any]:
        """Run one training step per micro-batch, and go backward.

        Args:
            calls: one per micro-batch; each returns a loss, a mapping with `loss`, or None.
            gradients: collects their gradients; None if their outputs are to keep their graphs.
            run_as: runs what a micro-batch does in a thread, forward and backward, with its number.

        Returns:
            Their results, in order.

        Raises:
            Exception: the error of the first one that failed; its message names the micro-batch.
        """
        if gradients is None:
            return self._in_order.run(self._pieces(names, [partial(run_as, *item) for item in enumerate(calls)]))
        if gradients.last is not None:
            gradients.last.may_begin &= self._knows_backward()
        in_order = self._must_run_in_order()
        around, waits = self._watched(len(calls)) if in_order else self._in_turns(len(calls), gradients.crossed)
        given = enumerate(zip(calls, around, strict=True))
        microbatches = [_MicroBatch(i, call, gradients, run_as, context) for i, (call, context) in given]
        try:
            outputs = self._run(self._in_order if in_order else self._threads, names, microbatches, waits)
            gradients.reduce()
        finally:
            gradients.collect()
        return outputs

    def shutdown(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()

    def _run(
        self, executor: Executor, names: Sequence[str], microbatches: Sequence["_MicroBatch"], waits: bool
    ) -> list[Any]:
        """Run all forward, then all backward, the last one first; or each backward as soon as it has been forward."""
        if not waits:
            return executor.run(self._pieces(names, [one.forward_and_backward for one in microbatches]))
        outputs = executor.run(self._pieces(names, [one.forward for one in microbatches]))
        executor.run(self._pieces(names, [one.backward for one in microbatches])[::-1])
        return outputs

    def _in_turns(self, num: int, crossed: Callable[[], None]) -> tuple[Sequence[_Around], bool]:
        """The contexts of micro-batches that overlap, and whether all are forward before the first goes backward."""
        name, stages = self._layout.options.schedule, self._layout.num_stages
        if self.overlap == "launch":
            orders = [launch_order(name, num, stages)]
        else:
            orders = [stage_order(name, num, stages, stage) for stage in range(stages)]
        turns = Turns(orders)
        waits = [not is_accelerator(device) for device in self._layout.devices]
        tickets = [Ticket(number, turns, waits, crossed) for number in range(num)]
        return [partial(self._layout.ticketed, ticket) for ticket in tickets], name == "gpipe"

    def _must_run_in_order(self) -> bool:
        if self.overlap is None or self.times is not None:
            return True
        state = self._kept_state
        return state is not None and (state.keeps_state or state.must_watch())

    def _knows_backward(self) -> bool:
        """Whether a backward pass adds to each parameter once, as far as is known, and is not measured."""
        state = self._kept_state
        return self.times is None and (state is None or not (state.must_watch() or state.nests_backward))

    def _watched(self, num: int) -> tuple[Sequence[_Around], bool]:
        """The same of micro-batches that run one after the other."""
        state = self._kept_state
        watched = state if state is not None and state.must_watch() else None
        all_launch = all(is_accelerator(device) for device in self._layout.devices)
        # accelerators are at work on several micro-batches if all are launched before the first goes backward
        waits = self._layout.options.schedule == "gpipe" or (all_launch and watched is None)
        around = [partial(self._seen, watched if i == 0 else None) for i in range(num)]
        return around, waits and self.times is None

    @contextmanager
    def _seen(self, watched: KeptState | None, phase: Phase) -> Generator[None]:
        """Time what a micro-batch does, or watch it."""
        if self.times is not None and phase == "F":
            self.times.begin_microbatch()
        with nullcontext() if watched is None else watched.watching(phase):
            yield
        if watched is not None and phase == "F":
            self._verify_reads(watched)
        if self.times is not None and phase == "B":
            self.times.end_microbatch()

    def _verify_reads(self, state: KeptState) -> None:
        """Refuse a step that reads gradients, if other micro-batches go backward meanwhile."""
        options = self._layout.options
        if state.reads_gradients and options.schedule == "1f1b":
            raise ConfigError(
                f"num_microbatches={options.num_microbatches}: training_step reads the .grad of a parameter, which "
                "holds gradients of other micro-batches under schedule=1f1b. Read it in on_before_optimizer_step, or "
                "set strategy.schedule=gpipe."
            )

    def _pieces(self, names: Sequence[str], calls: Sequence[Callable[[], Any]]) -> list[Piece]:
        device = self._layout.devices[0]
        return [Piece(device, *named) for named in zip(names, calls, strict=True)]


@dataclass
class _MicroBatch:
    """One micro-batch of a step: its step, and the context of what it does in a direction."""

    number: int
    call: Callable[[], Any]
    gradients: EarlyGradients
    run_as: RunAs
    around: _Around
    _loss: tuple[Tensor, Tensor | None] | None = None

    def forward_and_backward(self) -> Any:
        output = self.forward()
        self.backward()
        return output

    def forward(self) -> Any:
        with self.around("F"):
            output = self.run_as(self.number, self.call)
            self._loss = self.gradients.weighed(self.number, output)
            return _detached(output)

    def backward(self) -> None:
        weighed, self._loss = self._loss, None
        with self.around("B"):
            if weighed is not None:
                device = weighed[0].device
                backward = Piece(device, "backward", partial(self.gradients.go_backward, *weighed))
                with on_device(device):
                    self.run_as(self.number, partial(reraised, backward, backward.call))


def _detached(output: Any) -> Any:
    """What a micro-batch returned, with a loss whose graph has been used."""
    if isinstance(output, dict):
        return {**output, "loss": output["loss"].detach()} if isinstance(output.get("loss"), Tensor) else output
    return output.detach() if isinstance(output, Tensor) else output


class MicroBatchLogs(LogRecorder):
    """Logs each name once for the whole batch, though every micro-batch calls `self.log`."""

    def __init__(self, module: nn.Module, num_microbatches: int, device: torch.device) -> None:
        self._metrics = StepMetrics(module, num_microbatches, lambda: self._running.part)
        super().__init__([list(module.modules())] * num_microbatches, device, self._metrics.settle)

    @override
    @contextmanager
    def recording(self) -> Generator[None]:
        with self._metrics.recording(), super().recording():
            yield

    @override
    def replay(self, sizes: Sequence[int], losses: ChunkLosses | None = None) -> None:
        self._metrics.call(sizes, [] if losses is None else losses.losses)
        super().replay(sizes, losses)
        self._metrics.clear()

    def close(self) -> None:
        """Restore the methods of the module's metrics."""
        self._metrics.close()

    @override
    def run(self, part: int, call: Callable[[], Any]) -> Any:
        """Run a micro-batch's step, and record what this thread logs as that micro-batch's."""
        self._running.part = part
        return call()

    @override
    def _root_receiver(self, module: int) -> Receiver:
        return lambda *args, **options: self._record(self._running.part, module, *args, **options)
