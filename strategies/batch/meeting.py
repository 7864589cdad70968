"""Run the parts of a step so that they can meet: each comes to the same place of the step before any goes on.

Parts run one after the other in the calling thread, as without a meeting. When one meets the others, these begin in
threads of their own, in order, until they have come there, too; one thread runs at a time, so that random numbers and
writes have the same order in every run:

    part 1  ── step ──┐ meet                  ┌── rest ──┐
    part 2            └── step ──┐ meet       │          └── rest ──┐
    part 3                       └── step ── meet: combine          └── rest
"""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Self, override

from ..core.errors import ConfigError, PartsDiffer
from ..core.executor import Piece, ThreadState, Turns, reraised

Combine: TypeAlias = Callable[[Mapping[int, Any]], Mapping[int, Any]]
"""Makes of what the parts bring, by number, what each of them receives."""

_local = threading.local()


class Seat(NamedTuple):
    """A part's place in a meeting, as the code of its step finds it.

    Args:
        part: its number.
        meeting: None of a micro-batch, which can't wait for others: they have not begun, or their graphs are gone.
    """

    part: int
    meeting: "Meeting | None" = None

    def meet(self, where: str, value: Any, combine: Combine) -> Any:
        """Bring a value to a place, wait for the other parts there, and return what the first one's `combine` makes.

        If some have ended without coming here the step needs a whole batch.
        """
        if self.meeting is None:
            raise ConfigError(
                f"{where} needs the rows of all micro-batches at once, but was not called when the first step was "
                "verified, so that the run has no whole batches. Call it in every step, or set num_microbatches=1."
            )
        return self.meeting.meet(self.part, where, value, combine)


def seat() -> Seat | None:
    """The seat of the part whose step calls this; None where parts don't meet."""
    return getattr(_local, "seat", None)


@contextmanager
def seated(place: Seat | None) -> Generator[None]:
    """Give what runs in this thread, inside the block, a seat."""
    before, _local.seat = seat(), place
    try:
        yield
    finally:
        _local.seat = before


class _PartFailed(BaseException):
    """Ends the step of a part because another one has failed."""


class Meeting:
    """One step in parts that may meet: their steps are `given`.

    Attributes:
        num_parts: how many there are.
        has_met: whether they have met.
        state: of the calling thread, which those of parts have, too.
    """

    def __init__(self, given: Sequence[Piece]) -> None:
        self._given, self.num_parts = list(given), len(given)
        self._helpers: dict[int, Turns] = {}
        """The parts that have threads."""
        self._brought: dict[int, tuple[str, Any]] = {}
        self._answers: dict[int, Any] = {}
        self._failed: tuple[Piece, BaseException] | None = None
        self._home = threading.get_ident()
        self.state = ThreadState()
        self.has_met = False

    @property
    def pieces(self) -> list[Piece]:
        """What to run, in order."""  # not kept, so that no cycle keeps a step's batch
        return [replace(piece, call=partial(self._run, i)) for i, piece in enumerate(self._given)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for helper in self._helpers.values():
            helper.leave()
        if isinstance(error, _PartFailed) and self._failed is not None:
            reraised(self._failed[0], _raise, self._failed[1])
        # batches and graphs, which cycles through `pieces` and threads would keep until they are collected
        for kept in (self._given, self._helpers, self._brought, self._answers):
            kept.clear()

    def meet(self, part: int, where: str, value: Any, combine: Combine) -> Any:
        """See `Seat.meet`."""
        helper = self._helpers.get(part)
        if helper is not None:
            self._brought[part] = where, value
            helper.give_way()
            return self._answers[part]
        if threading.get_ident() != self._home:
            raise ConfigError(
                f"{where} was first called after the first step, which decides that parts of a batch run one after "
                "the other, not in threads. Call it in the first step, too, or set strategy.threads=false."
            )
        if part:  # those before have ended
            raise self._apart(part, where, 0, "its end")
        self.has_met, brought = True, {part: value}
        for other in range(1, self.num_parts):
            if (there := self._come(other)) != where:
                raise self._apart(part, where, other, there)
            brought[other] = self._brought[other][1]
        with seated(None):
            answers = combine(brought)
        self._answers.update(answers)
        return answers[part]

    def _come(self, part: int) -> str:
        """Let a part go on to where it meets the first; returns the place."""
        given = self._given[part]
        if part not in self._helpers:
            self._helpers[part] = Turns(replace(given, call=partial(self._seated, part)), self.state)
        helper = self._helpers[part]
        helper.resume()
        if helper.error is not None:
            self._failed = given, helper.error
            raise _PartFailed
        return "its end" if helper.is_done else self._brought[part][0]

    def _run(self, part: int) -> Any:
        """Run a part to its end: in this thread, or in its own if it has one."""
        helper = self._helpers.get(part)
        if helper is None:
            return self._seated(part)
        helper.resume()
        if helper.error is not None:
            raise helper.error
        if not helper.is_done:
            raise self._apart(part, self._brought[part][0], 0, "its end")
        return helper.result

    def _apart(self, part: int, where: str, other: int, there: str) -> PartsDiffer:
        return PartsDiffer(
            f"{self._given[part].name} is at {where}, and {self._given[other].name} at {there}: all parts of a batch "
            "must call the same, in the same order. Do so in every step, whatever the samples are."
        )

    def _seated(self, part: int) -> Any:
        with seated(Seat(part, self)):
            return self._given[part].call()


def _raise(error: BaseException) -> Any:
    raise error


@dataclass
class SimulatedRanks:
    """Ranks that one process stands in for, each for a part of a batch.

    Args:
        size: how many there are.
    """

    size: int

    @property
    def rank(self) -> int:
        """That of the part whose step asks."""
        place = seat()
        return min(0 if place is None else place.part, self.size - 1)

    def gather(self, tensor: Tensor, sync_grads: bool) -> Tensor:
        """What `all_gather` returns on each; see `RankStrategy.all_gather`."""
        if self.size == 1:
            return gathered(tensor, "", partial(torch.unsqueeze, dim=0))
        own, place = tensor if sync_grads and torch.is_grad_enabled() else tensor.detach(), seat()
        assert place is not None
        return place.meet("all_gather", own, _of_all_ranks)


class Alone(SimulatedRanks):
    """What a step learns of ranks: it is the only one."""

    def __init__(self) -> None:
        super().__init__(1)

    @override
    def gather(self, tensor: Tensor, sync_grads: bool) -> Tensor:
        return tensor


_simulated: list[SimulatedRanks] = []


@contextmanager
def simulating(ranks: SimulatedRanks) -> Generator[None]:
    """Have strategies answer for other ranks inside the block."""
    _simulated.append(ranks)
    try:
        yield
    finally:
        _simulated.pop()


def simulated_ranks() -> SimulatedRanks | None:
    """The ranks that this process stands in for; None outside of `simulating`."""
    return _simulated[-1] if _simulated else None


def gathered(tensor: Tensor, strategy: str, over_ranks: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Gather rows of this process's part of a batch from all ranks, if there are others.

    Raises:
        PartsDiffer: a part of the process's batch calls it, which has no rows of the others.
    """
    place = seat()
    if place is not None and (place.meeting is None or place.meeting.num_parts > 1):
        raise PartsDiffer(
            f"{strategy}: all_gather is called on a part of a batch. Compute the loss in evener.over_batch(fn)(...)"
        )
    return tensor if over_ranks is None else over_ranks(tensor)


def _of_all_ranks(brought: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    tensors = list(brought.values())
    if len({one.shape for one in tensors}) == 1:
        return dict.fromkeys(brought, torch.stack(tensors))
    if len({one.shape[1:] for one in tensors}) > 1:
        raise ValueError("all_gather is given rows of different shapes")
    return dict.fromkeys(brought, torch.cat(tensors).unsqueeze(0))
