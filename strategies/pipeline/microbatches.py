"""Run a training step in micro-batches, forward and backward: a loop over the tasks of a schedule, on one thread."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, get_rng_state, nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle
from torchmetrics import MetricCollection
from typing_extensions import override

from ..batch.exact.loss_reader import Part
from ..batch.log_recorder import LogRecorder
from ..batch.meeting import Seat, seated
from ..core.devices import is_accelerator
from ..core.executor import Piece, ThreadState, Turns, reraised
from ..core.module_checks import is_metric
from ..core.patching import LIGHTNING_KEYS, hooks_of
from ._gradients import EarlyGradients
from .stages import ScheduleName, Stages


class Task(NamedTuple):
    """One micro-batch on one stage, forward or backward."""

    phase: Literal["F", "B"]
    microbatch: int
    stage: int


def stage_order(name: ScheduleName, num_microbatches: int, num_stages: int, stage: int) -> list[Task]:
    """List the tasks of one stage, in order.

    ```
    1f1b      0   1   2   3   4   5   6   7   8   9     gpipe     0   1   2   3   4   5   6   7   8   9
    stage 0   F0  F1  .   B0  F2  B1  F3  B2  .   B3    stage 0   F0  F1  F2  F3  .   .   B3  B2  B1  B0
    stage 1   .   F0  B0  F1  B1  F2  B2  F3  B3  .     stage 1   .   F0  F1  F2  F3  B3  B2  B1  B0  .
    ```

    Source: PipeDream-Flush (Narayanan et al., 2020, arXiv:2006.09503), figure 3; GPipe (Huang et al., 2019,
    arXiv:1811.06965), figure 2c.
    """
    forward = [Task("F", i, stage) for i in range(num_microbatches)]
    if name == "gpipe":
        return forward + [Task("B", task.microbatch, stage) for task in reversed(forward)]
    ahead = num_stages - stage
    order = forward[:ahead]
    for i in range(num_microbatches):
        order += [Task("B", i, stage), *forward[ahead + i : ahead + i + 1]]
    return order


@cache
def launch_order(name: ScheduleName, num_microbatches: int, num_stages: int) -> list[Task]:
    """Put the tasks of all stages in one order, for a thread that queues them; a backward pass is launched whole."""
    orders = [deque(stage_order(name, num_microbatches, num_stages, stage)) for stage in range(num_stages)]
    launched: list[Task] = []
    while any(orders):
        done = {task._replace(stage=task.stage + 1) for task in launched}
        ready = [order for order in orders if order[0].phase == "F" and (not order[0].stage or order[0] in done)]
        launched += [order.popleft() for order in ready]
        if all(order[0].phase == "B" and order[0].microbatch == orders[0][0].microbatch for order in orders):
            launched.append([order.popleft() for order in orders][-1])
    return launched


class MicroBatches:
    """Runs micro-batches on the stages of a layout, each forward and, as soon as the schedule says so, backward."""

    def __init__(self, layout: Stages, module: pl.LightningModule, strategy: str) -> None:
        self._layout = layout
        self._state = _ModuleState(module, layout)
        num = layout.options.num_microbatches
        modules, devices = [list(module.modules())] * num, [layout.meeting_device] * num
        self.logs = LogRecorder(module, modules, devices, strategy)
        self._pool: ThreadPoolExecutor | None = None
        self._nests_backward = False

    def run(
        self,
        names: Sequence[str],
        calls: Sequence[Callable[[], Any]],
        gradients: EarlyGradients,
        meet: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Run a step per micro-batch, all but the last one backward, too, after `meet` if all losses are needed."""
        given = enumerate(zip(names, calls, strict=True))
        pieces = [
            Piece(self._layout.devices[0], name, partial(self._forward, i, call, gradients))
            for i, (name, call) in given
        ]
        # under `gpipe` steps need not be interrupted: each device gets its work in the same order
        options, num_stages = self._layout.options, 1
        schedule: ScheduleName = "gpipe" if meet is not None else options.schedule
        if schedule == "1f1b" and options.num_microbatches > 1 and self._state.may_alternate():
            num_stages = self._layout.num_stages
        order = launch_order(schedule, len(pieces), num_stages)
        if num_stages == 1 and self._state.is_known and all(map(is_accelerator, self._layout.devices)):
            # these are at work on several micro-batches if all are launched before the first goes backward; gradients
            # are added in the same order as in the first step, which is watched
            order = sorted(order, key=lambda task: task.phase == "B")
        pool = None
        if num_stages > 1:
            pool = self._pool = self._pool or ThreadPoolExecutor(num_stages, thread_name_prefix="stages")
        state = ThreadState()
        steps = [_Step(piece, state, self._layout, pool) for piece in pieces]
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
                # the loss of the batch goes backward through the last one, which would add to gradients that are
                # handed out already, if it ran other backward passes within itself
                if task is not order[-1] or self._nests_backward:
                    backward = partial(self.logs.run, number, partial(gradients.go_backward, number))
                    with record_function(f"B{number}"):
                        reraised(Piece(piece.device, f"backward of {piece.name}", backward), backward)
        finally:
            for step in steps:
                step.leave()
            gradients.collect()
        return [step.result for step in steps]

    def close(self) -> None:
        """Stop the threads, and restore the methods of the module's metrics."""
        self.logs.metrics.close()
        if self._pool is not None:
            self._pool.shutdown()

    def _forward(self, number: int, call: Callable[[], Any], gradients: EarlyGradients) -> Any:
        is_first = not (number or self._state.is_known)
        with seated(Seat(number)):
            output = self.logs.run(number, partial(self._state.watch, call) if is_first else call)
        output = gradients.take(number, output)
        if is_first:
            self._nests_backward = gradients.nest(number)
        return output


class _Step(Turns):
    """The step of a micro-batch, which gives way before it enters a stage; with no pool it is not interrupted."""

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

    def _call(self, piece: Piece, layout: Stages) -> Any:
        def enter(stage: int) -> None:
            self._stage = stage
            self.give_way()

        with layout.entering(enter):
            return piece.call()


class _ModuleState:
    """Finds out, by watching the first micro-batch, whether the micro-batches of a module may alternate.

    They would mix what a step keeps on the module from one layer to the next, and blocks of a thread that are open.
    """

    def __init__(self, module: nn.Module, stages: Stages) -> None:
        self._stages = stages
        self._parts = [part for part in module.modules() if not (is_metric(part) or isinstance(part, MetricCollection))]
        self._spaces = [space for part in self._parts for space in (vars(part), part._modules, part._parameters)]
        self._spaces += [part._buffers for part in self._parts if not isinstance(part, _BatchNorm)]
        self.is_known = self._keeps = False
        self._num_hooks = -1

    def may_alternate(self) -> bool:
        """Whether micro-batches may be on different stages at the same time, as far as is known."""
        if self.is_known and not self._keeps and _num_hooks() != self._num_hooks:
            own, self._num_hooks = {hook.id for hook in self._stages.hooks}, _num_hooks()
            self._keeps = not own.issuperset(n for part in self._parts for hooks in hooks_of(part) for n in hooks)
        return self.is_known and not self._keeps

    def watch(self, step: Callable[[], Any]) -> Any:
        """Run the first micro-batch of a run, and look whether others could come in between."""
        held = [list(space.values()) for space in self._spaces]  # so that no other object gets the number of one
        first, random_state, draws_again = self._state(), get_rng_state(), False

        def look(stage: int = 0) -> None:
            nonlocal draws_again
            self._keeps |= forward_ad._current_level >= 0 or self._state() != first
            inside: Any = torch._C
            saves_no_tensors = inside._autograd._top_saved_tensors_default_hooks(False) is not None
            draws_again |= saves_no_tensors or not torch.is_grad_enabled()

        with self._stages.entering(look):
            output = step()
        look()
        self._keeps |= draws_again and not torch.equal(random_state, get_rng_state())
        self.is_known = True
        held.clear()
        return output

    def _state(self) -> list[Any]:
        """What is another if a step has set anything."""
        keys = LIGHTNING_KEYS - {"training"}
        watched = ((key, value) for space in self._spaces for key, value in space.items() if key not in keys)
        return [_num_hooks(), *((key, *_mark(value)) for key, value in watched)]


def _num_hooks() -> int:
    """How many hooks were registered on modules and parameters."""
    return RemovableHandle.next_id - Part.num_hooks


def _mark(value: Any) -> tuple[Any, ...]:
    """What is another if a value was replaced, or written to."""
    if isinstance(value, Tensor):
        return id(value), value.requires_grad, 0 if value.is_inference() else value._version
    return id(value), len(value) if isinstance(value, (list, dict, set, deque)) else 0
