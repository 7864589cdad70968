"""Run a step that gives way between stages: a coroutine, on a thread on which it waits, as it may be anybody's code.

Who calls `run_through` waits until the step comes to a later stage, so that only one of them runs at a time. The
work of an accelerator is only queued meanwhile: its devices are at work on different micro-batches all the same.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Semaphore
from typing import Any

import torch

from ..core.devices import current_stream
from ..core.executor import Piece, ThreadState


class Whole:
    """A step that is not interrupted."""

    def __init__(self, piece: Piece, state: ThreadState) -> None:
        self._piece, self._state = piece, state
        self.output: Any = None

    def run_through(self, stage: int) -> None:
        """Run it."""
        self.output = self._state.run(self._piece)

    def abandon(self) -> None:
        """Nothing is under way."""


class Interruptible:
    """A step that is interrupted between stages.

    Args:
        entering: has the step call a function, inside a block, where it enters a stage for the first time.
        pool: has a free thread.
        state: what torch knows of the thread that calls `run_through`.
    """

    def __init__(
        self,
        piece: Piece,
        entering: Callable[[Callable[[int], None]], AbstractContextManager[None]],
        pool: ThreadPoolExecutor,
        state: ThreadState,
    ) -> None:
        self._piece, self._entering, self._pool, self._state = piece, entering, pool, state
        self._stage = 0
        self._has_begun = self._has_ended = self._is_abandoned = False
        self._resumed, self._gave_way = Semaphore(0), Semaphore(0)
        self._error: BaseException | None = None
        self.output: Any = None

    def run_through(self, stage: int) -> None:
        """Go on until a stage after this one is to be entered, or to the end."""
        if self._has_ended or self._stage > stage:
            return
        if self._has_begun:
            self._resumed.release()
        else:
            self._has_begun = True
            self._pool.submit(self._run, current_stream(self._piece.device))
        self._gave_way.acquire()
        if self._error is not None:
            raise self._error

    def _enter(self, stage: int) -> None:
        """Give way, in the step, before it enters a stage."""
        self._stage = stage
        self._gave_way.release()
        self._resumed.acquire()
        if self._is_abandoned:
            raise _AbandonedError

    def abandon(self) -> None:
        """End the step where it waits."""
        if self._has_begun and not self._has_ended:
            self._is_abandoned = True
            self._resumed.release()
            self._gave_way.acquire()

    def _run(self, stream: torch.Stream | None) -> None:
        try:
            with self._state.entered(self._piece.device, stream), self._entering(self._enter):
                self.output = self._piece.call()
        except BaseException as exc:  # noqa: BLE001  # raised again in the caller's thread
            self._error = exc
        finally:
            self._has_ended = True
            self._gave_way.release()


class _AbandonedError(BaseException):
    """Another micro-batch has failed."""
