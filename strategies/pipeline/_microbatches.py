"""Run a training step in micro-batches, forward and backward, on overlapping stages."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..batch.log_recorder import LogRecorder
from ..batch.losses import ChunkLosses
from ..core.devices import is_accelerator
from ..core.errors import ConfigError
from ..core.executor import Executor, Piece
from ..core.module_log import Receiver
from ._gradients import EarlyGradients
from ._kept_state import KeptState
from ._part_times import PartTimes
from ._schedule import launch_order, stage_order
from ._step_metrics import StepMetrics
from ._turns import Ticket, Turns
from .options import Overlap
from .stages import Stages


class MicroBatches:
    """Runs micro-batches on the stages of a layout, each forward and, as soon as the schedule says so, backward.

    Each micro-batch has a thread; `_turns.py` says which of them may run. One after the other run those of the first
    step, and all of a module that keeps state between its layers (see `_kept_state.py`) or is placed by hand.

    Args:
        module: the placed module, whose steps are watched; None trusts it to keep no state.
    """

    def __init__(self, layout: Stages, module: nn.Module | None = None) -> None:
        self._layout = layout
        self._kept_state = None if module is None else KeptState(module, layout.hook_numbers)
        self.times: PartTimes | None = None
        """Measures the parts of micro-batches, which then run one after the other."""
        self._in_order = Executor(threads=False)
        self._threads = Executor(threads=True, one_per_device=False)

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
        self, names: Sequence[str], calls: Sequence[Callable[[], Any]], gradients: EarlyGradients | None
    ) -> list[Any]:
        """Run one training step per micro-batch, and go backward.

        Args:
            calls: one per micro-batch; each returns a loss, a mapping with `loss`, or None.
            gradients: collects their gradients; None if their outputs are to keep their graphs.

        Returns:
            Their results, in order.

        Raises:
            Exception: the error of the first one that failed; its message names the micro-batch.
        """
        try:
            if gradients is None or self._must_run_in_order():
                return self._run_in_order(names, calls, gradients)
            tickets = self._tickets(len(calls))
            runs = [partial(self._run, *item, gradients) for item in zip(tickets, calls, strict=True)]
            return self._threads.run(self._pieces(names, runs))
        finally:
            if gradients is not None:
                gradients.collect()

    def shutdown(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()

    def _tickets(self, num: int) -> list[Ticket]:
        name, stages = self._layout.options.schedule, self._layout.num_stages
        if self.overlap == "launch":
            orders = [launch_order(name, num, stages)]
        else:
            orders = [stage_order(name, num, stages, stage) for stage in range(stages)]
        turns = Turns(orders)
        waits = [not is_accelerator(device) for device in self._layout.devices]
        return [Ticket(number, turns, waits) for number in range(num)]

    def _run(self, ticket: Ticket, call: Callable[[], Any], gradients: EarlyGradients) -> Any:
        with self._layout.ticketed(ticket), ticket.held():
            output = call()
            loss = gradients.weighed(ticket.microbatch, output)
            if loss is not None:
                ticket.turn_back()
                self._go_backward(loss, gradients)
            return _detached(output)

    def _go_backward(self, loss: Tensor, gradients: EarlyGradients) -> None:
        self._in_order.run([Piece(loss.device, "backward", partial(gradients.go_backward, loss))])

    def _must_run_in_order(self) -> bool:
        if self.overlap is None or self.times is not None:
            return True
        state = self._kept_state
        return state is not None and (state.keeps_state or state.must_watch())

    def _run_in_order(
        self, names: Sequence[str], calls: Sequence[Callable[[], Any]], gradients: EarlyGradients | None
    ) -> list[Any]:
        if gradients is None:
            return self._in_order.run(self._pieces(names, calls))
        state = self._kept_state
        watched = state if state is not None and state.must_watch() else None
        all_launch = all(is_accelerator(device) for device in self._layout.devices)
        # accelerators are at work on several micro-batches if all are launched before the first goes backward
        waits = self._layout.options.schedule == "gpipe" or (all_launch and watched is None)
        waits &= self.times is None
        pending: list[Callable[[], None]] = []

        def run(microbatch: int, call: Callable[[], Any]) -> Any:
            if self.times is not None:
                self.times.begin_microbatch()
            watching = watched if microbatch == 0 else None
            output = call() if watching is None else watching.watch(call)
            if watching is not None:
                self._verify_reads(watching)
            loss = gradients.weighed(microbatch, output)
            if loss is not None:
                go_backward = partial(self._go_backward, loss, gradients)
                pending.append(go_backward if watching is None else partial(watching.watch_backward, go_backward))
            while pending and not waits:
                pending.pop()()
            if self.times is not None:
                self.times.end_microbatch()
            return _detached(output)

        outputs = self._in_order.run(self._pieces(names, [partial(run, i, call) for i, call in enumerate(calls)]))
        while pending:
            pending.pop()()
        return outputs

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


def _detached(output: Any) -> Any:
    """What a micro-batch returned, with a loss whose graph has been used."""
    if isinstance(output, dict):
        return {**output, "loss": output["loss"].detach()} if isinstance(output.get("loss"), Tensor) else output
    return output.detach() if isinstance(output, Tensor) else output


class MicroBatchLogs(LogRecorder):
    """Logs each name once for the whole batch, though every micro-batch calls `self.log`.

    Args:
        num_microbatches: number of micro-batches per step.
        device: where the values are combined.
    """

    def __init__(self, module: nn.Module, num_microbatches: int, device: torch.device) -> None:
        self._on_thread = threading.local()
        self._metrics = StepMetrics(module, num_microbatches, lambda: self._on_thread.microbatch)
        super().__init__([list(module.modules())] * num_microbatches, device, self._metrics.settle)

    @override
    @contextmanager
    def recording(self) -> Generator[None]:
        with self._metrics.recording(), super().recording():
            yield

    @override
    def replay(self, sizes: Sequence[int], losses: ChunkLosses | None = None) -> None:
        self._metrics.call(sizes)
        super().replay(sizes, losses)
        self._metrics.clear()

    def close(self) -> None:
        """Restore the methods of the module's metrics."""
        self._metrics.close()

    def run(self, microbatch: int, call: Callable[[], Any]) -> Any:
        """Run a micro-batch's step, and record what this thread logs as that micro-batch's."""
        self._on_thread.microbatch = microbatch
        return call()

    @override
    def _root_receiver(self, module: int) -> Receiver:
        return lambda *args, **options: self._record(self._on_thread.microbatch, module, *args, **options)
