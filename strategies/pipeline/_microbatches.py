"""Run a training step in micro-batches: forward on overlapping stages, then backward."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..batch.log_recorder import LogRecorder
from ..batch.losses import ChunkLosses
from ..core.devices import is_accelerator
from ..core.executor import Executor, Piece
from ..core.patching import replaced
from ._kept_state import KeptState
from ._losses_last import LossesLast
from ._metric_values import MetricValues
from ._turns import Ticket, Turns
from ._whole_batch_metrics import WholeBatchMetrics
from .stages import Stages


class _Pending(NamedTuple):
    """A micro-batch that waits for its backward pass."""

    name: str
    loss: Tensor
    leaf: Tensor
    """Stands in for the loss in the caller's graph; its gradient starts the backward pass of the loss itself."""
    ticket: Ticket


class MicroBatches:
    """Runs micro-batches on the stages of a layout.

    If all stages are accelerators, the micro-batches are launched in order: launches return at once, so stages work on
    different micro-batches at the same time, in backward too. Where they meet on the first stage's device, their losses
    are computed last (see `_losses_last.py`). If a stage is a CPU, each micro-batch has its own
    thread (see `_turns.py`), and `finish_backward` runs its backward pass; the first step, and every step of a module
    that keeps state between its layers (see `_kept_state.py`), runs them in order instead.

    Args:
        module: the placed module, whose steps are watched; None trusts it to keep no state.
    """

    def __init__(self, layout: Stages, module: nn.Module | None = None) -> None:
        self._layout = layout
        self._kept_state = None if module is None else KeptState(module, layout.hook_numbers)
        self._in_order = Executor(threads=False)
        self._threads = Executor(threads=True, one_per_device=False)
        self._pending: list[_Pending] = []

    @property
    def _may_overlap(self) -> bool:
        options = self._layout.options
        in_order = (
            torch.are_deterministic_algorithms_enabled() if options.deterministic is None else options.deterministic
        )
        many = options.num_microbatches > 1 and self._layout.num_stages > 1 and self._layout.plan is not None
        return many and not in_order

    @property
    def uses_threads(self) -> bool:
        """Whether micro-batches may run at once, so that `finish_backward` must follow the backward of the loss."""
        return self._may_overlap and not all(is_accelerator(device) for device in self._layout.devices)

    @property
    def _puts_losses_last(self) -> bool:
        all_launch = all(is_accelerator(device) for device in self._layout.devices)
        return self._may_overlap and all_launch and self._layout.meeting_stage == 0

    def forward(self, names: Sequence[str], calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one training step per micro-batch.

        Args:
            calls: one per micro-batch; each returns a loss, a mapping with `loss`, or None.

        Returns:
            Their results, in order.

        Raises:
            Exception: the error of the first one that failed; its message names the micro-batch.
        """
        if self._must_run_in_order():
            return self._run_in_order(names, calls)
        device = self._layout.devices[0]
        if not self.uses_threads:
            order = LossesLast(len(calls))
            runs = [partial(order.run, i, partial(self._run_and_pause, order, i, call)) for i, call in enumerate(calls)]
            return self._threads.run([Piece(device, *named) for named in zip(names, runs, strict=True)])
        turns = Turns(len(calls), self._layout.num_stages, "F")
        waits = [not is_accelerator(device) for device in self._layout.devices]
        tickets = [Ticket(number, turns, waits) for number in range(len(calls))]
        runs = [partial(self._run_forward, ticket, call) for ticket, call in zip(tickets, calls, strict=True)]
        outputs = self._threads.run([Piece(device, *named) for named in zip(names, runs, strict=True)])
        self._pending = []
        return [self._set_aside(*item) for item in zip(names, outputs, tickets, strict=True)]

    def finish_backward(self) -> None:
        """Run the backward pass of each micro-batch, from the gradient of its loss."""
        pending, self._pending = self._pending, []
        pending = [item for item in pending if item.leaf.grad is not None]
        turns = Turns(len(pending), self._layout.num_stages, "B")
        for number, item in enumerate(pending):
            item.ticket.microbatch = number
        pieces = [Piece(i.loss.device, f"backward of {i.name}", partial(self._run_backward, i, turns)) for i in pending]
        if pieces:
            self._threads.run(pieces[::-1])

    def shutdown(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()
        self._pending = []

    def _must_run_in_order(self) -> bool:
        if not (self.uses_threads or self._puts_losses_last):
            return True
        state = self._kept_state
        return state is not None and (state.keeps_state or state.must_watch())

    def _run_in_order(self, names: Sequence[str], calls: Sequence[Callable[[], Any]]) -> list[Any]:
        has_threads = self.uses_threads or self._puts_losses_last
        if has_threads and self._kept_state is not None and self._kept_state.must_watch():
            calls = [partial(self._kept_state.watch, calls[0]), *calls[1:]]
        device = self._layout.devices[0]
        return self._in_order.run([Piece(device, *named) for named in zip(names, calls, strict=True)])

    def _run_forward(self, ticket: Ticket, call: Callable[[], Any]) -> Any:
        with self._layout.ticketed(ticket):
            return ticket.run(call)

    def _run_and_pause(self, order: LossesLast, microbatch: int, call: Callable[[], Any]) -> Any:
        with self._layout.pausing(partial(order.pause, microbatch)):
            return call()

    def _run_backward(self, item: _Pending, turns: Turns) -> None:
        with self._layout.ticketed(item.ticket):
            item.ticket.run_backward(partial(torch.autograd.backward, item.loss, item.leaf.grad), turns)

    def _set_aside(self, name: str, output: Any, ticket: Ticket) -> Any:
        """Detach the loss from its graph, so that backward passes of micro-batches can run in parallel."""
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return output
        leaf = loss.detach().requires_grad_()
        self._pending.append(_Pending(name, loss, leaf, ticket))
        return {**output, "loss": leaf} if isinstance(output, dict) else leaf


class MicroBatchLogs(LogRecorder):
    """Logs each name once for the whole batch, though every micro-batch calls `self.log`.

    Args:
        num_microbatches: number of micro-batches per step.
        device: where the values are combined.
    """

    def __init__(self, module: nn.Module, num_microbatches: int, device: torch.device) -> None:
        self._on_thread = threading.local()
        self._whole = WholeBatchMetrics(module, num_microbatches, lambda: self._on_thread.microbatch)
        others = [part for part in module.modules() if not self._whole.holds(part)]
        self._metrics = MetricValues(others, lambda: self._on_thread.microbatch)
        super().__init__([list(module.modules())] * num_microbatches, device, self._metrics.settle)

    @override
    @contextmanager
    def recording(self) -> Generator[None]:
        self._calls = [[] for _ in self._modules]
        with ExitStack() as stack:
            stack.enter_context(self._whole.recording())
            stack.enter_context(self._metrics.recording())
            for index, module in enumerate(self._modules[0]):
                stack.enter_context(replaced(module, "log", partial(self._log, index)))
            yield

    @override
    def replay(self, sizes: Sequence[int], losses: ChunkLosses | None = None) -> None:
        self._whole.call(sizes)
        super().replay(sizes, losses)
        self._metrics.clear()

    def run(self, microbatch: int, call: Callable[[], Any]) -> Any:
        """Run a micro-batch's step, and record what this thread logs as that micro-batch's."""
        self._on_thread.microbatch = microbatch
        return call()

    def _log(self, module: int, *args: Any, **options: Any) -> None:
        self._recorders[self._on_thread.microbatch][module](*args, **options)
