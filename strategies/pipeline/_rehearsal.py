"""Run micro-batches without a graph first, where a function of the whole batch needs the rows of all (`over_batch`).

Then each micro-batch computes the function on everybody's rows, its own with a graph, so that one micro-batch's graph
is in memory at a time. Its rows' gradients are divided by its share of the batch, with which its loss goes backward.

Source: GradCache (Gao et al., 2021), "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup".
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..batch.losses import LossReduction, chunk_losses, weight_in
from ..batch.whole.meeting import Meeting, seated
from ..batch.whole.over_batch import Columns, own_rows
from ..core.devices import current_stream
from ..core.errors import ConfigError
from ..core.executor import Executor, Piece, ThreadState
from ..core.rng import capture, isolated, restore
from ..core.types import Batch
from ..core.untraced_step import trial_step
from ._gradients import not_zero


@dataclass
class _Step:
    """The micro-batches of one training step.

    Args:
        names: of the micro-batches, for errors.
        step: the module's step, of a chunk.
    """

    names: Sequence[str]
    step: Callable[[Batch], Any]
    chunks: Sequence[Batch]
    sizes: Sequence[int]
    calls: list[Columns] | None = None
    """What the micro-batches gave, call by call; None before the rehearsal."""
    weights: list[Tensor | float] = field(default_factory=list[Tensor | float])
    state: ThreadState = field(default_factory=ThreadState)
    begins: list[Any] = field(default_factory=list[Any])
    """The random state with which each micro-batch begins."""


class Rehearsal:
    """Gives the micro-batches of a module their places in functions of the whole batch.

    Args:
        module: the placed module.
        devices: of the stages.
        reduction: whether a micro-batch's loss is a mean or a sum.
        strategy: name that begins messages.
        unrecorded: a context in which metrics are called for no micro-batch.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        devices: Sequence[torch.device],
        reduction: LossReduction,
        strategy: str,
        unrecorded: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._module, self._devices = module, list(dict.fromkeys(devices))
        self._reduction: LossReduction = reduction
        self._strategy, self._unrecorded = strategy, unrecorded
        self._is_needed, self._has_run = False, False
        self.draws = False
        """Whether micro-batches must run one after the other, to draw the random numbers that they drew before."""
        self._home = 0
        self._step: _Step | None = None

    def begin(
        self, names: Sequence[str], step: Callable[[Batch], Any], chunks: Sequence[Batch], sizes: Sequence[int]
    ) -> None:
        """Begin a step: rehearse it, if the last one has called a function of the whole batch."""
        self._home, self._step = threading.get_ident(), _Step(names, step, chunks, sizes)
        if self._is_needed:
            self._rehearse(self._step)

    def end(self) -> None:
        """End a step, and release what its micro-batches gave."""
        self._step, self._has_run = None, True

    def run(self, number: int, call: Callable[[], Any]) -> Any:
        """Run a micro-batch for good."""
        step = self._step
        assert step is not None
        if self._is_needed:
            restore(step.begins[number], self._devices)
        elif not (number or self._has_run):
            step.begins.append(capture(self._devices))
        with seated(_Place(number, partial(self._columns, step))):
            return call()

    def _columns(self, step: _Step, number: int, call: int) -> tuple[Columns, Callable[[], Tensor | float]]:
        """What was given to a call of a function of the batch, and the share of a micro-batch."""
        if step.calls is None:
            if threading.get_ident() != self._home:
                raise ConfigError(
                    f"{self._strategy}: over_batch was first called after the first step, by micro-batches in threads. "
                    "Call it in every step, or set num_microbatches=1."
                )
            with ThreadPoolExecutor(1) as pool:  # a thread of its own, since a micro-batch is under way in this one
                pool.submit(self._rehearse_apart, step, current_stream(self._devices[0])).result()
        assert step.calls is not None
        if call >= len(step.calls):
            raise ConfigError(
                f"{self._strategy}: {step.names[number]} calls over_batch more often than when it was run without a "
                "graph. Call it as often in every run of a step."
            )
        weights = step.weights
        total: Any = sum(weights[1:], start=weights[0])
        return step.calls[call], lambda: weights[number] / total

    def _rehearse_apart(self, step: _Step, stream: torch.Stream | None) -> None:
        with step.state.entered(self._devices[0], stream):
            self._rehearse(step)

    def _rehearse(self, step: _Step) -> None:
        if self._reduction == "sum":
            raise ConfigError(
                f"{self._strategy}: over_batch computes the whole batch's value, and loss_reduction=sum would add it "
                "once per micro-batch. Return a mean, with loss_reduction=mean."
            )
        first, begins = step.begins[:1], list[Any]()
        calls: list[Columns] = []

        def combine(brought: Mapping[int, Any]) -> Mapping[int, Any]:
            columns = Columns(brought)
            calls.append(columns)
            value = columns.value(columns.pieces)
            return dict.fromkeys(brought, value)

        def part(chunk: Batch) -> Any:
            begins.append(capture(self._devices))
            return step.step(copy.deepcopy(chunk))  # a step may write to its batch

        pieces = [
            Piece(self._devices[0], name, partial(part, chunk))
            for name, chunk in zip(step.names, step.chunks, strict=True)
        ]
        trial = trial_step(self._module, evaluates=False)
        with isolated(self._devices), torch.no_grad(), self._unrecorded(), trial:
            if first:
                restore(first[0], self._devices)
            with Meeting(pieces, step.sizes, combine) as meeting:
                outputs = Executor(threads=False).run(meeting.pieces)
            self.draws = not _are_same(begins[0], capture(self._devices))
        self._is_needed = bool(calls)
        if not calls:
            return
        step.calls, step.begins = calls, begins
        step.weights = [1.0 * size for size in step.sizes]
        if None not in outputs:
            if calls[0].ranks is not None and any(weight_in(output) is not None for output in outputs):
                raise ConfigError(
                    f"{self._strategy}: over_batch and all_gather need the share of this rank before its micro-batches "
                    "go backward, and loss_weight tells it afterwards. Leave loss_weight out (what the loss divides by "
                    "is found), or set num_microbatches=1."
                )
            given = chunk_losses(outputs, step.sizes, self._reduction, self._strategy).weights
            step.weights = [not_zero(weight) for weight in given]


@dataclass
class _Place:
    """Where a micro-batch calls functions of the whole batch."""

    number: int
    columns: Callable[[int, int], tuple[Columns, Callable[[], Tensor | float]]]
    num_calls: int = 0

    def whole(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute what `over_batch` is given over all parts of this process, and those of other ranks."""
        columns, share = self.columns(self.number, self.num_calls)
        self.num_calls += 1
        own, place, ranks = columns.rows_of(fn, args, kwargs), columns.first + self.number, columns.ranks
        of_all = share if ranks is None else lambda: share() * ranks.share()
        pieces = [list(column) for column in columns.pieces]
        for column, rows in zip(pieces, own, strict=True):
            column[place] = own_rows(rows.to(column[place].device), of_all)
        return columns.value(pieces, (fn, args, kwargs))


def _are_same(state: Any, other: Any) -> bool:
    """Whether two random states are the same."""
    pairs = zip(tree_leaves(state), tree_leaves(other), strict=True)
    return all(torch.equal(one, two) if isinstance(one, Tensor) else one == two for one, two in pairs)
