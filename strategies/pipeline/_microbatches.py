"""One training step in micro-batches: forward on stages that overlap, then backward."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..batch.log_recorder import LogRecorder
from ..core.devices import is_accelerator
from ..core.executor import Executor, Piece
from ..core.patching import replaced
from ._turns import Ticket, Turns
from .layout import StageLayout


class _Pending(NamedTuple):
    """A micro-batch whose backward pass is still to come."""

    name: str
    loss: Tensor
    leaf: Tensor
    """Stands for the loss in what the caller computes from it; its gradient starts the loss's own backward pass."""
    ticket: Ticket


class MicroBatches:
    """Runs micro-batches on a layout of stages.

    Where all stages are accelerators, one thread launches the micro-batches in order: launches return at once, so
    that a stage works on one micro-batch while the next stage works on another, in backward too. Where a stage is a
    CPU, each micro-batch has a thread (see `_turns.py`), and its backward pass is run by `finish_backward`.

    Args:
        layout: the stages.
    """

    def __init__(self, layout: StageLayout) -> None:
        self._layout = layout
        self._in_order = Executor(threads=False)
        self._threads = Executor(threads=True)
        self._pending: list[_Pending] = []

    @property
    def uses_threads(self) -> bool:
        """Whether micro-batches have threads, so that `finish_backward` is needed after the loss's own backward."""
        options = self._layout.options
        in_order = (
            torch.are_deterministic_algorithms_enabled() if options.deterministic is None else options.deterministic
        )
        many = options.num_microbatches > 1 and self._layout.num_stages > 1 and self._layout.plan is not None
        return many and not in_order and not all(is_accelerator(device) for device in self._layout.devices)

    def forward(self, names: Sequence[str], calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one training step per micro-batch.

        Args:
            names: what each is, for errors.
            calls: each returns a loss, a mapping with `loss`, or None.

        Returns:
            What they returned, in order.

        Raises:
            Exception: the first one's that failed; its message names the micro-batch.
        """
        device = self._layout.devices[0]
        if not self.uses_threads:
            return self._in_order.run([Piece(device, *named) for named in zip(names, calls, strict=True)])
        turns = Turns(len(calls), self._layout.num_stages, "F")
        waits = [not is_accelerator(device) for device in self._layout.devices]
        tickets = [Ticket(number, turns, waits) for number in range(len(calls))]
        runs = [partial(self._run_forward, ticket, call) for ticket, call in zip(tickets, calls, strict=True)]
        outputs = self._threads.run([Piece(device, *named) for named in zip(names, runs, strict=True)])
        self._pending = []
        return [self._set_aside(*item) for item in zip(names, outputs, tickets, strict=True)]

    def finish_backward(self) -> None:
        """Run the backward pass of each micro-batch, from the gradient that its loss has been given."""
        pending, self._pending = self._pending, []
        pending = [item for item in pending if item.leaf.grad is not None]
        turns = Turns(len(pending), self._layout.num_stages, "B")
        for number, item in enumerate(pending):
            item.ticket.microbatch = number
        pieces = [Piece(i.loss.device, f"backward of {i.name}", partial(self._run_backward, i, turns)) for i in pending]
        if pieces:
            self._threads.run(pieces[::-1])

    def shutdown(self) -> None:
        """End the threads."""
        self._threads.shutdown()
        self._pending = []

    def _run_forward(self, ticket: Ticket, call: Callable[[], Any]) -> Any:
        with self._layout.ticketed(ticket):
            return ticket.run(call)

    def _run_backward(self, item: _Pending, turns: Turns) -> None:
        with self._layout.ticketed(item.ticket):
            item.ticket.run_backward(partial(torch.autograd.backward, item.loss, item.leaf.grad), turns)

    def _set_aside(self, name: str, output: Any, ticket: Ticket) -> Any:
        """Cut the loss off its graph, so that the micro-batches' graphs can be run side by side."""
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return output
        leaf = loss.detach().requires_grad_()
        self._pending.append(_Pending(name, loss, leaf, ticket))
        return {**output, "loss": leaf} if isinstance(output, dict) else leaf


class MicroBatchLogs(LogRecorder):
    """Logs each name once for the whole batch, though every micro-batch calls `self.log`.

    Args:
        module: the module that logs; its parts log, too.
        num_microbatches: micro-batches of a step.
        device: where the values are combined.
    """

    def __init__(self, module: nn.Module, num_microbatches: int, device: torch.device) -> None:
        super().__init__([list(module.modules())] * num_microbatches, device, lambda metric: metric)
        self._on_thread = threading.local()

    @override
    @contextmanager
    def recording(self) -> Generator[None]:
        self._calls = [[] for _ in self._modules]
        with ExitStack() as stack:
            for index, module in enumerate(self._modules[0]):
                stack.enter_context(replaced(module, "log", partial(self._log, index)))
            yield

    def run(self, microbatch: int, call: Callable[[], Any]) -> Any:
        """Run a micro-batch's step, so that what this thread logs is known for its own."""
        self._on_thread.microbatch = microbatch
        return call()

    def _log(self, module: int, *args: Any, **options: Any) -> None:
        self._recorders[self._on_thread.microbatch][module](*args, **options)
