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
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Self, override

from ..core.errors import ConfigError, PartsDiffer
from ..core.executor import Piece, ThreadState, Turns, reraised

Combine: TypeAlias = Callable[[Mapping[int, Any]], Mapping[int, Any]]
"""Makes of what the parts bring, by number, what each of them receives."""

_local = threading.local()


@dataclass
class Seat:
    """A part's place in a meeting, as the code of its step finds it.

    Args:
        part: its number.
        num_samples: samples of each part.
    """

    meeting: "Meeting"
    part: int
    num_samples: Sequence[float]

    def meet(self, where: str, value: Any, combine: Combine) -> Any:
        """Bring a value to a place, wait for the other parts there, and return what the first one's `combine` makes.

        If some have ended without coming here the step needs a whole batch.
        """
        return self.meeting.meet(self.part, where, value, combine)


class InTurn(Seat):
    """The place of a micro-batch, which can't wait for others: they have not begun, or their graphs are gone."""

    def __init__(self, part: int) -> None:
        self.part = part

    @override
    def meet(self, where: str, value: Any, combine: Combine) -> Any:
        raise ConfigError(
            f"{where} needs the rows of all micro-batches at once, but was not called when the first step was "
            "verified, so that the run has no whole batches. Call it in every step, or set num_microbatches=1."
        )


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
    """One step in parts that may meet.

    Args:
        pieces: the parts' steps.
        num_samples: samples of each.

    Attributes:
        has_met: whether parts have met.
        state: of the calling thread, which those of parts have, too.
    """

    def __init__(self, pieces: Sequence[Piece], num_samples: Sequence[float]) -> None:
        self._given = list(pieces)
        self._num_samples = num_samples
        self._helpers: dict[int, Turns] = {}
        """The parts that have threads."""
        self._brought: dict[int, tuple[str, Any, Combine]] = {}
        self._answers: dict[int, Any] = {}
        self._failed: tuple[int, BaseException] | None = None
        self._home = threading.get_ident()
        self.state = ThreadState()
        self.has_met = False

    @property
    def pieces(self) -> list[Piece]:
        """What to run, in order."""  # not kept, so that no cycle keeps a step's batch
        return [Piece(piece.device, piece.name, partial(self._run, i)) for i, piece in enumerate(self._given)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for helper in self._helpers.values():
            helper.leave()
        if isinstance(error, _PartFailed) and self._failed is not None:
            part, cause = self._failed
            reraised(self._given[part], _raise, cause)
        # batches and graphs, which cycles through `pieces` and threads would keep until they are collected
        for kept in (self._given, self._helpers, self._brought, self._answers):
            kept.clear()

    def meet(self, part: int, where: str, value: Any, combine: Combine) -> Any:
        """See `Seat.meet`."""
        helper = self._helpers.get(part)
        if helper is None:
            if threading.get_ident() != self._home:
                raise ConfigError(
                    f"{where} was first called after the first step, which decides that parts of a batch run one after "
                    "the other, not in threads. Call it in the first step, too, or set strategy.threads=false."
                )
            return self._gather({part: (where, value, combine)})[part]
        self._brought[part] = (where, value, combine)
        helper.give_way()
        return self._answers[part]

    def _run(self, part: int) -> Any:
        """Run a part to its end: in this thread, or in its own if it has one."""
        helper = self._helpers.get(part)
        if helper is None:
            return self._seated(part)
        while not helper.is_done:
            helper.resume()
            if not helper.is_done:  # it meets those that are left
                self._answers[part] = self._gather({part: self._brought[part]})[part]
        if helper.error is not None:
            raise helper.error
        return helper.result

    def _gather(self, brought: dict[int, tuple[str, Any, Combine]]) -> Mapping[int, Any]:
        """Let the parts after one come to where it is, and combine what all bring."""
        self.has_met = True
        (part,) = brought
        for other in range(part + 1, len(self._given)):
            helper = self._helpers.get(other) or self._start(other)
            helper.resume()
            if helper.error is not None:
                self._failed = (other, helper.error)
                raise _PartFailed
            if not helper.is_done:
                brought[other] = self._brought[other]
        where, _, combine = brought[part]
        for other, given in enumerate(self._given):
            place = brought[other][0] if other in brought else "its end"
            if place != where:
                raise PartsDiffer(
                    f"{self._given[part].name} is at {where}, and {given.name} at {place}: all parts of a batch must "
                    "call the same, in the same order. Do so in every step, whatever the samples are."
                )
        with seated(None):
            answers = combine({other: value for other, (_, value, _) in brought.items()})
        for other in brought.keys() - {part}:
            self._answers[other] = answers[other]
        return answers

    def _start(self, part: int) -> Turns:
        given = self._given[part]
        self._helpers[part] = Turns(Piece(given.device, given.name, partial(self._seated, part)), self.state)
        return self._helpers[part]

    def _seated(self, part: int) -> Any:
        before, _local.seat = seat(), Seat(self, part, self._num_samples)
        try:
            return self._given[part].call()
        finally:
            _local.seat = before


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
    if isinstance(place, InTurn) or (place is not None and len(place.num_samples) > 1):
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
