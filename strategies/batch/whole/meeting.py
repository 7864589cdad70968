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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from typing_extensions import Self

from ...core.devices import current_stream
from ...core.errors import ConfigError
from ...core.executor import Piece, ThreadState, reraised

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
        """Wait for the other parts, and return what `combine` makes for this one.

        Parts that have ended, which did not come here, are left out.

        Args:
            where: names the place; all parts must be at the same.
            value: what this part brings.
            combine: called once; that of the first part.
        """
        return self.meeting.meet(self.part, where, value, combine)


def seat() -> Any:
    """The seat of the part whose step calls this: a `Seat`, or what `seated` was given; None outside of both."""
    return getattr(_local, "seat", None)


@contextmanager
def seated(place: Any) -> Generator[None]:
    """Give what runs in this thread, inside the block, a seat."""
    before, _local.seat = seat(), place
    try:
        yield
    finally:
        _local.seat = before


class _Left(BaseException):
    """Ends the thread of a part whose step is given up."""


class _PartFailed(BaseException):
    """Ends the step of a part because another one has failed."""


@dataclass
class _Helper:
    """The thread of a part."""

    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    yielded: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    brought: tuple[str, Any, Combine] | None = None
    answer: Any = None
    result: Any = None
    error: BaseException | None = None
    is_done: bool = False
    is_left: bool = False


class Meeting:
    """One step in parts that may meet.

    Args:
        pieces: the parts' steps.
        num_samples: samples of each.
        combine: takes the place of what parts bring to combine functions of the batch; None for theirs.

    Attributes:
        has_met: whether parts have met.
        state: of the calling thread, which those of parts have, too.
    """

    def __init__(self, pieces: Sequence[Piece], num_samples: Sequence[float], combine: Combine | None = None) -> None:
        self.combine = combine
        self._given = list(pieces)
        self._num_samples = num_samples
        self._helpers: dict[int, _Helper] = {}
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
            if not helper.is_done:
                helper.is_left = True
                self._resume(helper)
        if isinstance(error, _PartFailed) and self._failed is not None:
            part, cause = self._failed
            reraised(self._given[part], _raise, cause)
        self._given.clear()  # batches, which the cycle through `pieces` would keep until it is collected

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
        helper.brought = (where, value, combine)
        helper.yielded.release()
        helper.turn.acquire()
        if helper.is_left:
            raise _Left
        return helper.answer

    def _run(self, part: int) -> Any:
        """Run a part to its end: in this thread, or in its own if it has one."""
        helper = self._helpers.get(part)
        if helper is None:
            return self._seated(part)
        while not helper.is_done:
            self._resume(helper)
            if not helper.is_done:  # it meets those that are left
                assert helper.brought is not None
                helper.answer = self._gather({part: helper.brought})[part]
        if helper.error is not None:
            raise helper.error
        return helper.result

    def _gather(self, brought: dict[int, tuple[str, Any, Combine]]) -> Mapping[int, Any]:
        """Let the parts after one come to where it is, and combine what all bring."""
        self.has_met = True
        (part,) = brought
        for other in range(part + 1, len(self._given)):
            helper = self._helpers.get(other)
            if helper is None:
                helper = self._start(other)
            elif not helper.is_done:
                self._resume(helper)
            if helper.error is not None:
                self._failed = (other, helper.error)
                raise _PartFailed
            if not helper.is_done:
                assert helper.brought is not None
                brought[other] = helper.brought
        where, _, combine = brought[part]
        for other, (place, *_) in brought.items():
            if place != where:
                raise ConfigError(
                    f"{self._given[part].name} is at {where}, and {self._given[other].name} at {place}: all parts of a "
                    "batch must call the same, in the same order. Do so in every step, whatever the samples are."
                )
        with seated(None):
            answers = combine({other: value for other, (_, value, _) in brought.items()})
        for other in brought.keys() - {part}:
            self._helpers[other].answer = answers[other]
        return answers

    def _start(self, part: int) -> _Helper:
        helper = self._helpers[part] = _Helper()
        device = self._given[part].device
        args = (part, helper, current_stream(device))
        threading.Thread(target=self._work, args=args, name=self._given[part].name, daemon=True).start()
        helper.yielded.acquire()
        return helper

    def _work(self, part: int, helper: _Helper, stream: Any) -> None:
        try:
            with self.state.entered(self._given[part].device, stream):
                helper.result = self._seated(part)
        except _Left:
            pass
        except BaseException as exc:  # noqa: BLE001  # raised again in the caller's thread
            helper.error = exc
        helper.is_done = True
        helper.yielded.release()

    def _seated(self, part: int) -> Any:
        before, _local.seat = seat(), Seat(self, part, self._num_samples)
        try:
            return self._given[part].call()
        finally:
            _local.seat = before

    def _resume(self, helper: _Helper) -> None:
        helper.turn.release()
        helper.yielded.acquire()


def _raise(error: BaseException) -> Any:
    raise error
