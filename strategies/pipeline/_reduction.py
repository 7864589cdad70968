"""Reduce gradients over ranks while the last micro-batch of a step goes backward.

A parameter's sum is final when the last micro-batch has added to it. From the moment when no other micro-batch goes
backward any more, whatever is added is final: the wrapper of the ranks may listen, and gets what was final before.

    threads   stage 0   .   B2 | B3        launch   stage 0   .   .   .   B2  .  | .   B3
              stage 1   B2  B3 | .                  stage 1   .   .   B2  .   B3 | B3  .
                               begins: stage 1's gradients, then those of B3 on stage 0 as they come
"""

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import nn

from ..core.errors import ConfigError
from ..core.private import of_torch, put

_NESTED = (
    "A backward pass has added to a parameter twice (torch.utils.checkpoint with use_reentrant=True), which that of "
    "the first step has not, and its gradient was being reduced over the ranks. Set use_reentrant=False, or "
    "strategy.find_unused_parameters=true, which reduces gradients at the end of the backward pass."
)


class Reduction(Protocol):
    """Reduces the gradients of one step over the ranks, before the loss of its batch is known.

    Attributes:
        share: what a loss is multiplied by, if it is a mean over the samples of this rank.
        per_weight: what a loss times its `loss_weight` is multiplied by; None if no number is right on all ranks.
        overlaps: whether it may begin while gradients are computed.
    """

    share: float
    per_weight: float | None
    overlaps: bool

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduce the gradients of parameters, and from the first call on those that a backward pass adds to."""

    def finish(self) -> None:
        """Verify that all gradients are reduced."""


class LastBackward:
    """Reduces the gradients of one step, as early as they are final."""

    def __init__(self, parameters: Sequence[nn.Parameter], num_microbatches: int, reduction: Reduction) -> None:
        self.may_begin = reduction.overlaps
        """Whether it may begin before all have been backward."""
        self._parameters = parameters
        self._reduction = reduction
        self._to_begin = self._to_end = num_microbatches
        self._final: list[nn.Parameter] = []
        self._has_begun = False
        self._thread: int | None = None
        self._lock = threading.Lock()
        for parameter in parameters:  # not later: other threads may be reading it
            if of_torch.post_accumulate_grad_hooks(parameter) is None:
                put(parameter, post_accumulate_grad_hooks={})

    @contextmanager
    def one(self) -> Generator[None]:
        """Run the backward pass of a micro-batch in the block."""
        with self._lock:
            self._to_begin -= 1
            is_last = self._to_begin == 0
        if is_last:
            self._thread = threading.get_ident()
            for parameter in self._parameters:
                of_torch.post_accumulate_grad_hooks(parameter)[self] = self._note
            self.begin()
        try:
            yield
        except RuntimeError as exc:
            if "mark a variable ready only once" in str(exc):
                raise ConfigError(_NESTED) from exc
            raise
        with self._lock:
            self._to_end -= 1

    def begin(self) -> None:
        """Begin, if the calling thread has the only micro-batch that has not been backward."""
        if not self._has_begun and self.may_begin and self._to_end == 1 and self._is_last():
            self._has_begun = True
            self._reduction.reduce(list(self._final))

    def finish(self) -> None:
        """Reduce what is left when all micro-batches have been backward."""
        final = set(self._final) if self._has_begun else set[nn.Parameter]()
        left = [p for p in reversed(self._parameters) if p.grad is not None and p not in final]
        # buckets are made in the order of the first reduction, which one call for all would not keep
        in_order = not self._has_begun and self._reduction.overlaps
        for group in [[parameter] for parameter in left] if in_order else [left] if left else []:
            self._reduction.reduce(group)
        if left or final:
            self._reduction.finish()

    def close(self) -> None:
        """Remove the hooks."""
        for parameter in self._parameters:
            of_torch.post_accumulate_grad_hooks(parameter).pop(self, None)

    def _is_last(self) -> bool:
        return threading.get_ident() == self._thread

    def _note(self, parameter: nn.Parameter) -> None:
        if self._has_begun or self._is_last():
            self._final.append(parameter)
