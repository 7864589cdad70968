"""Corrections of what a rank logs, known only when the ranks' parts of the batch are known.

A rank sees its own part of the global batch. A value that it logs counts by samples, unless

- the rank has no samples: it shows the value of the others, and counts for nothing;
- the value is the loss, and the module returned a `loss_weight`: it counts by that weight;
- `batch_size` was given. It may be a constant for the whole batch, of which the rank has its share, the samples of the
  rank's own part, or another number of that part, such as that of the valid labels that the loss is a mean over. The
  sums of each case are kept, and the ranks decide together at the end of the epoch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, nan
from typing import Any, NamedTuple

from lightning_fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from ...strategies.batch.given_sizes import constant_of
from ...strategies.batch.losses import WeighedLoss
from ...strategies.core.private import of_metrics
from ...strategies.core.private.of_lightning import ResultMetric
from ...strategies.data.sampling import Share

GIVEN = "given_sizes"
"""Name under which an entry of the results keeps what `batch_size` it was given."""


@dataclass
class GivenSizes:
    """The epoch's mean of a key as it is if the given `batch_size` is a constant for the whole batch.

    Args:
        value: sum of the values, each weighted by this rank's share of the constant.
        own: whether each was the number of samples of this rank.
        more_value: what is added to the sum of the values, as they were weighted by what was given, if each was the
            number of samples on all ranks: a loss with a `loss_weight` then counts by this rank's part of that weight.
        more_weight: the same for the sum of the weights.
        shares: numbers of samples that this rank had, where it had any.
        totals: numbers of samples of the global batches.
    """

    value: Any = 0.0
    weight: Any = 0.0
    smallest: float = inf
    largest: float = -inf
    own: bool = True
    more_value: Any = 0.0
    more_weight: Any = 0.0
    num: int = 0
    shares: list[float] = field(default_factory=list[float])
    totals: list[float] = field(default_factory=list[float])

    def add(self, value: Any, given: Any, share: Share) -> None:
        """Add a value that was logged with `batch_size=given`."""
        self.num += 1
        self._note(self.totals, share.total)
        if not share.num:
            return
        self._note(self.shares, share.num)
        self.own = self.own and isinstance(given, int) and given == share.num
        constant = constant_of(given)
        if constant is None:  # counted, perhaps on the device, where reading it would wait
            self.smallest, self.largest = -inf, inf
            return
        self.smallest, self.largest = min(self.smallest, constant), max(self.largest, constant)
        weight = constant * share.num / share.total
        self.value = self.value + value * weight
        self.weight += weight

    def reweigh(self, value: Tensor, given: Any, scale: Tensor, share: Share, num_ranks: int) -> None:
        """Weight a value that `add` has added by `scale`, as `WeighedLoss` has it, in place of this rank's samples."""
        if not share.num:
            return
        if self.own:
            more = scale * (share.total / num_ranks) - given
            self.more_value = self.more_value + value * more.to(value.dtype)
            self.more_weight = self.more_weight + more
        constant = constant_of(given)
        if constant is not None:
            more = constant * (scale / num_ranks - share.num / share.total)
            self.value = self.value + value * more.to(value.dtype)
            self.weight = self.weight + more

    @staticmethod
    def _note(numbers: list[float], number: float) -> None:
        if number not in numbers:
            numbers.append(number)

    def tell(self, metric: ResultMetric) -> dict[str, Any]:
        """Return it as plain data for the other ranks."""
        told = {name: one.item() if isinstance(one, Tensor) else one for name, one in asdict(self).items()}
        return {**told, "whole": self.num == of_metrics.update_count(metric)}


def are_constants(name: str, told: Sequence[Mapping[str, Any] | None]) -> bool:
    """Whether the ranks gave a constant for the whole batch, by all that they gave in the epoch.

    Args:
        name: what was logged.
        told: by rank that logged with weight, from `GivenSizes.tell`; None for one that gave no `batch_size`.
    """
    if not told or not all(one is not None and one["whole"] for one in told):
        return False
    known = [one for one in told if one is not None]
    number = known[0]["smallest"]
    own = all(one["own"] for one in known)
    one_number = min(one["smallest"] for one in known) == max(one["largest"] for one in known)
    if not one_number or (own and number != 1):
        return False
    shares, totals = ({size for one in known for size in one[name]} for name in ("shares", "totals"))
    if len(totals) > 1 and (own or len(shares) == 1):
        had = "1 sample" if own else f"{shares.pop()}"
        rank_zero_warn(
            f"self.log({name!r}, batch_size={number}): in this epoch every part of a batch that had samples had {had}, "
            "and batches differ in their number of parts, so that a constant for the whole batch can't be told from "
            "the size of a part, and the epoch's mean depends on it. It is taken for "
            f"{'the size' if own else 'a constant'}. If it is not, leave batch_size out."
        )
    return not own


def over_ranks(kind: str, values: Sequence[float], weights: Sequence[float]) -> float:
    """Combine what ranks logged by step under one name.

    Args:
        kind: `mean`, by the weights; `sum`, `max` or `min`; or `own` for the first rank's.

    Returns:
        The value, nan for a mean of nothing.
    """
    if kind == "own":
        return values[0]
    if kind != "mean":
        return {"sum": sum, "max": max, "min": min}[kind](values)
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else nan


class Logged(NamedTuple):
    """One value that this rank logged in the batch at hand.

    Args:
        value: what `self.log` received.
        copy: its copy, as it was then; None for a number or a metric object.
        size: samples that it was weighted by.
        given: whether `batch_size` was given.
    """

    metric: ResultMetric
    value: Any
    copy: Tensor | None
    size: Any
    given: bool


def reweigh_losses(
    tracked: Sequence[Logged], weighed: Sequence[WeighedLoss], share: Share | None, num_ranks: int
) -> None:
    """Weight the loss by the module's `loss_weight`, wherever it was logged as a mean.

    Args:
        weighed: the losses; several if the optimizer called its closure several times.
        share: this rank's part of the batch in samples; None if all ranks have equally many.
    """
    last = {id(logged.metric): logged for logged in tracked}
    for logged in tracked:
        if logged.copy is None or not logged.metric.meta.is_mean_reduction:
            continue
        loss = next((one for one in weighed if one.is_loss(logged.value)), None)
        if loss is not None:
            _reweigh(logged, loss.scale, share, num_ranks, logged is last[id(logged.metric)])


def _reweigh(logged: Logged, scale: Tensor, share: Share | None, num_ranks: int, is_last: bool) -> None:
    state, meta, copy = vars(logged.metric), logged.metric.meta, logged.copy
    assert copy is not None
    own = logged.size if share is None else share.num
    total = own if share is None else share.total / num_ranks
    if meta.on_step and meta.sync.should and own and is_last:  # the step's value is the last one
        by_samples = 1.0 if share is None else num_ranks * share.num / share.total
        state[of_metrics.FORWARD_CACHE].mul_((scale / by_samples).to(copy.dtype))
    if not meta.on_epoch:
        return
    if GIVEN in state and logged.given and share is not None:
        given: GivenSizes = state[GIVEN]
        given.reweigh(copy, logged.size, scale, share, num_ranks)
    elif not logged.given or isinstance(logged.size, int):
        more = scale * total - logged.size
        state["value"] = state["value"] + copy * more.to(copy.dtype)
        state["cumulated_batch_size"] = state["cumulated_batch_size"] + more
