"""Say what was found of a step that is computed in parts of a batch."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..tree import Path
from .plans import OF_SAMPLES, Plan
from .programs import Program


class Views(NamedTuple):
    """How a strategy cuts batches: before they are collated, after it, or both."""

    ranks: bool
    chunks: bool


@dataclass
class Verdict:
    """What was found.

    Args:
        plans: of the loss; in manual optimization of each call of `manual_backward`; empty if batches can't be cut.
        refusal: what differs, and what to do; empty if nothing does.
        told: lines for the log.
        unused: whether some trained parameters take no part in a loss.
        programs: of logged values.
        failed: whether nothing could be compared; as the step has `raised` an error, perhaps.
        in_chunks: whether parts of ranks are right, and chunks of these are not.
        unlike: the logged values that parts don't give, and what to do; empty if they give all.
        readings: what the `batch_size` of logged values is, see `Values`.
        rows: the arguments of metrics that are rows, see `Values`.
        appends: the attributes, by path, with lists to which parts append in training, and are joined.
        uneven: the submodules that parts don't call as the whole batch does: samples choose them.
        outside: those of which a step uses parameters outside of their forward.
        has_changed: whether the step computes otherwise by now; it is known where it was looked at.
    """

    plans: list[Plan] = field(default_factory=lambda: [OF_SAMPLES])
    refusal: str = ""
    told: list[str] = field(default_factory=list[str])
    unused: bool = False
    programs: dict[str, Program] = field(default_factory=dict[str, Program])
    unlike: str = ""
    readings: dict[str, str] = field(default_factory=dict[str, str])
    rows: set[Any] = field(default_factory=set[Any])
    appends: set[Path] = field(default_factory=set[Path])
    failed: bool = False
    raised: bool = False
    in_chunks: bool = False
    uneven: set[str] = field(default_factory=set[str])
    outside: set[str] = field(default_factory=set[str])
    has_changed: Callable[[], bool] | None = None

    def waits(self, again: Collection[bool]) -> bool:
        """Whether to compare later, see `verified`."""
        return self.failed and self.raised in again
